"""FLUX.1 with a transformer of int8 weights: half the bytes on the GPU, on the link and on disk.

torchao quantizes one weight after another, so the original weights are never all in RAM. Each start quantizes again: to do it
once, save the transformer with `save_pretrained`, and pass what you open from there to the pipeline.

    pip install torchao
    python examples/quantized.py "a lighthouse in the fog" --folder /nvme/offload
    python examples/quantized.py --tiny
"""

import argparse
import importlib.util
import sys

import torch
from diffusers import FluxPipeline, PipelineQuantizationConfig, TorchAoConfig

from group_offload import from_pretrained, handles_of

parser = argparse.ArgumentParser(description="FLUX.1 with a transformer of int8 weights.")
parser.add_argument("prompt", nargs="?", default="a lighthouse in the fog")
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the hub, or a folder")
parser.add_argument("--folder", default="offload", help="a folder on a fast disk, for the quantized weights")
parser.add_argument("--output", default="flux-int8.png")
parser.add_argument("--tiny", action="store_true", help="random weights, on the CPU, in seconds")
args = parser.parse_args()

if importlib.util.find_spec("torchao") is None:
    print("Skipped: this example needs torchao, which is not installed. Install it with: pip install torchao")
    sys.exit(0 if args.tiny else 1)
from torchao.quantization import Int8WeightOnlyConfig  # noqa: E402 (it is there)

options = {"vram_budget": "7GiB", "ram_budget": "auto"}
size, steps = 1024, 28
if args.tiny:
    import tiny

    args.model, options = tiny.flux(), tiny.ON_CPU
    size, steps = 64, 2

pipe = from_pretrained(
    FluxPipeline,
    args.model,
    dtype=torch.bfloat16,
    quantization_config=PipelineQuantizationConfig(
        quant_mapping={"transformer": TorchAoConfig(Int8WeightOnlyConfig())}
    ),
    offload_to_disk_path=args.folder,
    **options,
)
image = pipe(
    args.prompt,
    height=size,
    width=size,
    num_inference_steps=steps,
    guidance_scale=3.5,
    generator=torch.Generator().manual_seed(0),
).images[0]
image.save(args.output)

for name, handle in handles_of(pipe).items():
    print(f"\n{name}\n{handle.plan}")
print(f"\nWeights of the transformer: {type(pipe.transformer.transformer_blocks[0].attn.to_q.weight).__name__}.")
print(f"Wrote an image of {size} x {size} pixels in {steps} steps to {args.output}.")
