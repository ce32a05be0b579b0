"""Train a LoRA of FLUX.1 while the weights of FLUX.1 are offloaded.

The weights live in RAM, or in their files, and are copied to the GPU block by block, once for forward and once for backward.
The LoRA, its gradients and the optimizer's state stay on the GPU.

    python examples/train_lora.py PICTURES "a photo of sks dog"
    python examples/train_lora.py --tiny
"""

import argparse
from pathlib import Path

import torch
from diffusers import FluxPipeline
from diffusers.training_utils import cast_training_params
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image

from group_offload import enable_group_offload

parser = argparse.ArgumentParser(description="Train a LoRA of FLUX.1 over offloaded weights.")
parser.add_argument("pictures", nargs="?", help="a folder of .png and .jpg files")
parser.add_argument("prompt", nargs="?", default="a photo of sks dog", help="the prompt that all pictures are for")
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the hub, or a folder")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--output", default="lora", help="the folder that the LoRA is written to")
parser.add_argument("--tiny", action="store_true", help="random weights, on the CPU, in seconds")
args = parser.parse_args()

options, size = {}, 512
if args.tiny:
    import tiny

    args.model, args.pictures, options = tiny.flux(), tiny.pictures(), tiny.ON_CPU
    args.steps, size = 4, 64
if args.pictures is None:
    parser.error("PICTURES: give a folder, or --tiny")
paths = sorted(path for path in Path(args.pictures).iterdir() if path.suffix.lower() in (".png", ".jpg", ".jpeg"))
if not paths:
    parser.error(f"{args.pictures} has no .png and no .jpg files")

pipe = FluxPipeline.from_pretrained(args.model, dtype=torch.bfloat16)
transformer = pipe.transformer.requires_grad_(False).train()
transformer.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
cast_training_params(transformer)  # the LoRA in float32, the other weights as they are
transformer.enable_gradient_checkpointing()

handles = enable_group_offload(pipe, **options)
device = handles["transformer"].config.onload_device

# The prompt and the pictures are encoded once. VAE and text encoders are offloaded too.
torch.manual_seed(0)
examples = []
with torch.no_grad():
    prompt_embeds, pooled_embeds, text_ids = pipe.encode_prompt(args.prompt, prompt_2=None, device=device)
    for path in paths:
        picture = pipe.image_processor.preprocess(Image.open(path).convert("RGB"), size, size)
        latents = pipe.vae.encode(picture.to(device, torch.bfloat16)).latent_dist.sample()
        latents = (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
        examples.append(pipe._pack_latents(latents, *latents.shape))
side = latents.shape[-1] // 2
image_ids = pipe._prepare_latent_image_ids(1, side, side, device, torch.bfloat16)
guidance = torch.ones(1, device=device) if transformer.config.guidance_embeds else None
print(f"Encoded {len(examples)} pictures of {size} x {size} pixels.")

trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4)
for step in range(args.steps):
    clean = examples[step % len(examples)]
    noise = torch.randn_like(clean)
    sigma = torch.sigmoid(torch.randn(1, device=device))
    velocity = transformer(
        hidden_states=((1 - sigma) * clean + sigma * noise).to(torch.bfloat16),
        timestep=sigma,
        guidance=guidance,
        pooled_projections=pooled_embeds,
        encoder_hidden_states=prompt_embeds,
        txt_ids=text_ids,
        img_ids=image_ids,
        return_dict=False,
    )[0]
    loss = (velocity.float() - (noise - clean).float()).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step < 4 or step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.4f}")

FluxPipeline.save_lora_weights(args.output, transformer_lora_layers=get_peft_model_state_dict(transformer))

stats = handles["transformer"].stats()
print(f"\ntransformer\n{handles['transformer'].plan}")
print(f"{stats.onloads} onloads in {stats.forward_passes} forwards and {stats.backward_passes} backwards.")
print(f"{stats.trainable_bytes / 2**20:.2f} MiB of LoRA on the device.")
print(f"Wrote the LoRA to {args.output}. Use it with pipe.load_lora_weights({args.output!r}).")
