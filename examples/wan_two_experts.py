"""Wan 2.2 with its two experts of 14 billion parameters on a card with 16 GB.

One expert computes the first steps of a video, and the other one the rest. Both live in files and in RAM, and the blocks
that stay on the GPU are those of the expert that runs. Weights that are float32 in the checkpoint are cast once, into
the folder.

    python examples/wan_two_experts.py "a lighthouse in the fog" --folder /nvme/offload
    python examples/wan_two_experts.py --tiny
"""

import argparse

import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_gif

from group_offload import from_pretrained, handles_of

parser = argparse.ArgumentParser(description="Wan 2.2 with two experts on a card with 16 GB.")
parser.add_argument("prompt", nargs="?", default="a lighthouse in the fog")
parser.add_argument("--model", default="Wan-AI/Wan2.2-T2V-A14B-Diffusers", help="a name on the hub, or a folder")
parser.add_argument("--folder", default="offload", help="a folder on a fast disk, for the weights that are cast")
parser.add_argument("--output", default="wan.gif")
parser.add_argument("--tiny", action="store_true", help="random weights, on the CPU, in seconds")
args = parser.parse_args()

options = {"vram_budget": "15GiB", "ram_budget": "auto"}  # the driver takes the rest of the card
height, width, num_frames, steps = 480, 832, 81, 40
if args.tiny:
    import tiny

    args.model, options = tiny.wan(), tiny.ON_CPU
    height, width, num_frames, steps = 32, 32, 5, 10

pipe = from_pretrained(
    WanPipeline,
    args.model,
    dtype={"vae": torch.float32, "default": torch.bfloat16},
    offload_to_disk_path=args.folder,
    interleave_forwards=True,  # guidance makes two calls in each step: the weights are sent once for both
    **options,
)
frames = pipe(
    args.prompt,
    negative_prompt="blurry, overexposed, static",
    height=height,
    width=width,
    num_frames=num_frames,
    num_inference_steps=steps,
    guidance_scale=4.0,
    guidance_scale_2=3.0,
    generator=torch.Generator().manual_seed(0),
    output_type="pil",
).frames[0]
export_to_gif(frames, args.output)  # export_to_video writes an mp4, if imageio is installed

for name, handle in handles_of(pipe).items():
    print(f"\n{name}: {handle.stats().forward_passes} calls\n{handle.plan}")
print(f"\nWrote a video of {len(frames)} frames, {width} x {height} pixels, in {steps} steps to {args.output}.")
