"""FLUX.1 on two GPUs of one machine: each loads a shard of every block, and they compute one image together.

With `--train` they train instead: a LoRA, under DDP, over the same offloaded weights.

    torchrun --nproc_per_node 2 examples/two_gpus.py "a lighthouse in the fog"
    torchrun --nproc_per_node 2 examples/two_gpus.py --train
    python examples/two_gpus.py --tiny
"""

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FluxPipeline
from peft import LoraConfig
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from group_offload import enable_group_offload

parser = argparse.ArgumentParser(description="FLUX.1 on two GPUs that share each block.")
parser.add_argument("prompt", nargs="?", default="a lighthouse in the fog")
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the hub, or a folder")
parser.add_argument("--output", default="flux.png")
parser.add_argument("--train", action="store_true", help="train a LoRA on noise, to see that it runs")
parser.add_argument("--tiny", action="store_true", help="random weights, on the CPU, in seconds")


def make_image(pipe: Any, args: argparse.Namespace, size: int, steps: int) -> None:
    if not args.tiny:  # diffusers runs models in parallel on accelerators only
        pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))
    generator = torch.Generator().manual_seed(0)
    image = pipe(args.prompt, height=size, width=size, num_inference_steps=steps, generator=generator).images[0]
    if dist.get_rank() == 0:
        image.save(args.output)
        print(f"Wrote an image of {size} x {size} pixels in {steps} steps to {args.output}.")


def train(pipe: Any, steps: int) -> None:
    transformer, config = pipe.transformer, pipe.transformer.config
    transformer.requires_grad_(False)
    torch.manual_seed(0)  # all ranks begin with the same LoRA
    transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"]))
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    # By default the first rank sends all weights to the others, also the frozen ones.
    parallel = DistributedDataParallel(transformer, init_sync=False)
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    torch.manual_seed(dist.get_rank())  # each GPU has a batch of its own
    device, dtype = pipe._execution_device, transformer.dtype
    for step in range(steps):
        latents = torch.randn(1, 16, config.in_channels, device=device, dtype=dtype)
        output = parallel(
            hidden_states=latents,
            encoder_hidden_states=torch.randn(1, 8, config.joint_attention_dim, device=device, dtype=dtype),
            pooled_projections=torch.randn(1, config.pooled_projection_dim, device=device, dtype=dtype),
            timestep=torch.rand(1, device=device, dtype=dtype),
            img_ids=torch.zeros(16, 3, device=device, dtype=dtype),
            txt_ids=torch.zeros(8, 3, device=device, dtype=dtype),
            guidance=torch.ones(1, device=device, dtype=dtype),
            return_dict=False,
        )[0]
        loss = (output - latents).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")


def run(args: argparse.Namespace) -> None:
    options: dict[str, Any] = {}
    size, steps = 1024, 28
    if args.tiny:
        options, size, steps = {"onload_device": "cpu"}, 64, 2
    else:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    pipe = FluxPipeline.from_pretrained(args.model, dtype=torch.bfloat16)
    handles = enable_group_offload(pipe, process_group=dist.group.WORLD, **options)
    if not args.train:
        make_image(pipe, args, size, steps)
    if args.train or args.tiny:
        train(pipe, 2 if args.tiny else 100)
    if dist.get_rank() == 0:
        print(handles["transformer"].plan)
        gathered = handles["transformer"].stats().bytes_from_peers
        print(f"{gathered / 2**20:.1f} MiB came from other GPUs. (Groups below 2 MiB are not shared.)")
    dist.barrier()
    dist.destroy_process_group()


def run_tiny(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    run(args)


if __name__ == "__main__":
    args = parser.parse_args()
    if args.tiny:
        import tiny

        args.model = tiny.flux()
        with tempfile.TemporaryDirectory() as folder:
            start = multiprocessing.start_processes  # type: ignore[attr-defined]
            start(run_tiny, (args, folder), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]
    else:
        run(args)
