"""FLUX.1 in bfloat16 on a card with 16 GB, with losslessly compressed weights.

The transformer has 22 GiB, and about 16 compressed. Blocks that fit stay on the GPU, compressed or not, and the others are sent
compressed. The GPU decompresses a block right before it computes. Outputs are bit-exact.

    python examples/flux_compressed.py "a lighthouse in the fog"
    python examples/flux_compressed.py --tiny
"""

import argparse

import torch
from diffusers import FluxPipeline

from group_offload import from_pretrained, handles_of

parser = argparse.ArgumentParser(description="FLUX.1 in bfloat16 on a card with 16 GB, compressed.")
parser.add_argument("prompt", nargs="?", default="a lighthouse in the fog")
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the hub, or a folder")
parser.add_argument("--output", default="flux.png")
parser.add_argument("--tiny", action="store_true", help="random weights, on the CPU, in seconds")
args = parser.parse_args()

options = {"compress": True, "vram_budget": "15GiB", "ram_budget": "auto"}  # the driver takes the rest of the card
size, steps = 1024, 28
if args.tiny:
    import tiny

    args.model, options = tiny.flux(), tiny.ON_CPU  # a CPU computes with weights where they are: it compresses nothing
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
    compressed = [group for group in handle.groups if group.compressed_bytes]
    before, after = sum(group.num_bytes for group in compressed), sum(group.compressed_bytes for group in compressed)
    print(f"\n{name}\n{handle.plan}")
    print(
        f"{len(compressed)} of {len(handle.groups)} groups are compressed: {before / 2**30:.2f} GiB are {after / 2**30:.2f}."
    )
print(f"\nWrote an image of {size} x {size} pixels in {steps} steps to {args.output}.")
