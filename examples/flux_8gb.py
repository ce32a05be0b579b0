"""FLUX.1 on a card with 8 GB.

The weights (31 GiB with both text encoders) live in RAM, and in the checkpoint's files if RAM is too small. As many blocks as
fit stay on the GPU, and the others are prefetched.

    python examples/flux_8gb.py "a lighthouse in the fog"
    python examples/flux_8gb.py --tiny
"""

import argparse

import torch
from diffusers import FluxPipeline

from group_offload import from_pretrained, handles_of

parser = argparse.ArgumentParser(description="FLUX.1 on a card with 8 GB.")
parser.add_argument("prompt", nargs="?", default="a lighthouse in the fog")
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the hub, or a folder")
parser.add_argument("--output", default="flux.png")
parser.add_argument("--tiny", action="store_true", help="random weights, on the CPU, in seconds")
args = parser.parse_args()

options = {"vram_budget": "7GiB", "ram_budget": "auto"}  # the driver takes the rest of the card
size, steps = 1024, 28
if args.tiny:
    import tiny

    args.model, options = tiny.flux(), tiny.ON_CPU
    size, steps = 64, 2

pipe = from_pretrained(FluxPipeline, args.model, dtype=torch.bfloat16, **options)
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
print(f"\nWrote an image of {size} x {size} pixels in {steps} steps to {args.output}.")
