"""FLUX.1 with a ControlNet that follows the edges of a picture.

ControlNet and transformer alternate in each step. Within a budget both keep on the GPU what fits, side by side.
This example loads the pipeline with diffusers' own call and offloads it afterwards.

    python examples/flux_controlnet.py "a lighthouse in the fog" --edges edges.png
    python examples/flux_controlnet.py --tiny
"""

import argparse
from typing import Any

import torch
from diffusers import FluxControlNetModel, FluxControlNetPipeline
from PIL import Image, ImageDraw

from group_offload import enable_group_offload

parser = argparse.ArgumentParser(description="FLUX.1 with a ControlNet.")
parser.add_argument("prompt", nargs="?", default="a lighthouse in the fog")
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the hub, or a folder")
parser.add_argument("--controlnet", default="InstantX/FLUX.1-dev-Controlnet-Canny", help="the same, of the ControlNet")
parser.add_argument("--edges", help="a picture of white edges on black (default: the outline of a tower)")
parser.add_argument("--output", default="flux-controlnet.png")
parser.add_argument("--tiny", action="store_true", help="random weights, on the CPU, in seconds")
args = parser.parse_args()

options: dict[str, Any] = {"vram_budget": "auto", "ram_budget": "auto"}
size, steps = 1024, 28
if args.tiny:
    import tiny

    args.model, args.controlnet, options = tiny.flux(), tiny.flux_controlnet(), tiny.ON_CPU
    size, steps = 64, 2

if args.edges:
    edges = Image.open(args.edges).convert("RGB").resize((size, size))
else:
    edges = Image.new("RGB", (size, size))
    tower = [(0.4, 0.9), (0.45, 0.3), (0.55, 0.3), (0.6, 0.9), (0.4, 0.9)]
    ImageDraw.Draw(edges).line([(x * size, y * size) for x, y in tower], fill="white", width=max(1, size // 256))

controlnet = FluxControlNetModel.from_pretrained(args.controlnet, dtype=torch.bfloat16)
pipe = FluxControlNetPipeline.from_pretrained(args.model, controlnet=controlnet, dtype=torch.bfloat16)
handles = enable_group_offload(pipe, **options)
image = pipe(
    args.prompt,
    control_image=edges,
    controlnet_conditioning_scale=0.6,
    height=size,
    width=size,
    num_inference_steps=steps,
    guidance_scale=3.5,
    generator=torch.Generator().manual_seed(0),
).images[0]
image.save(args.output)

for name, handle in handles.items():
    print(f"\n{name}: {handle.stats().forward_passes} calls\n{handle.plan}")
print(f"\nWrote an image of {size} x {size} pixels in {steps} steps to {args.output}.")
