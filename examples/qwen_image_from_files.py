"""Qwen-Image, 54 GiB of weights, on a machine with little RAM.

The weights stay in the checkpoint's files, and threads read them ahead of the compute that needs them. RAM holds what fits in
the budget. Opening reads no weight.

    python examples/qwen_image_from_files.py "a lighthouse in the fog" --ram 12GiB
    python examples/qwen_image_from_files.py --tiny
"""

import argparse

import torch
from diffusers import QwenImagePipeline

from group_offload import from_pretrained, handles_of

parser = argparse.ArgumentParser(description="Qwen-Image from files, with little RAM.")
parser.add_argument("prompt", nargs="?", default="a lighthouse in the fog")
parser.add_argument("--model", default="Qwen/Qwen-Image", help="a name on the hub, or a folder")
parser.add_argument(
    "--folder", default="offload", help="a folder on a fast disk, for weights that are cast, if there are any"
)
parser.add_argument("--ram", default="12GiB", help="RAM for the whole process")
parser.add_argument("--output", default="qwen-image.png")
parser.add_argument("--tiny", action="store_true", help="random weights, on the CPU, in seconds")
args = parser.parse_args()

options = {"vram_budget": "auto"}
size, steps = 1328, 50
if args.tiny:
    import tiny

    args.model, options = tiny.qwen_image(), tiny.ON_CPU
    size, steps = 64, 2

pipe = from_pretrained(
    QwenImagePipeline,
    args.model,
    dtype=torch.bfloat16,
    offload_to_disk_path=args.folder,
    ram_budget=args.ram,
    interleave_forwards=True,  # guidance makes two calls in each step: the weights are read and sent once for both
    **options,
)
image = pipe(
    args.prompt,
    negative_prompt=" ",
    height=size,
    width=size,
    num_inference_steps=steps,
    true_cfg_scale=4.0,
    generator=torch.Generator().manual_seed(0),
).images[0]
image.save(args.output)

for name, handle in handles_of(pipe).items():
    print(f"\n{name}\n{handle.plan}")
    print("Bytes read so far:", handle.stats().bytes_read)
print(f"\nWrote an image of {size} x {size} pixels in {steps} steps to {args.output}.")
