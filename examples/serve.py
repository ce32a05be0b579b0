"""A server for FLUX.1 that works on four requests at once, and sends the weights once for all of them.

Each request runs in a thread of its own. With `interleave_forwards=True` the steps of all requests meet: each block is copied
to the GPU once, and every request computes with it. Images are the same, bit for bit, as if each request ran alone.

    python examples/serve.py
    curl "http://127.0.0.1:8000/?prompt=a+lighthouse+in+the+fog&seed=1" > lighthouse.png

    python examples/serve.py --tiny     sends four requests to itself, and ends
"""

import argparse
import copy
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlencode, urlsplit
from urllib.request import urlopen

import torch
from diffusers import FluxPipeline

from group_offload import from_pretrained, handles_of

parser = argparse.ArgumentParser(description="A server for FLUX.1 that works on several requests at once.")
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="a name on the hub, or a folder")
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--threads", type=int, default=4, help="requests at once; the others wait")
parser.add_argument("--output", default="served-{}.png", help="names of images with --try")
parser.add_argument("--try", dest="tries", action="store_true", help="send one request for each thread, and end")
parser.add_argument("--tiny", action="store_true", help="--try with random weights, on the CPU, in seconds")
args = parser.parse_args()

options = {"vram_budget": "22GiB"}
size, steps = 1024, 28
if args.tiny:
    import tiny

    args.model, options, args.tries, args.port = tiny.flux(), tiny.ON_CPU, True, 0
    size, steps = 64, 24

pipe = from_pretrained(FluxPipeline, args.model, dtype=torch.bfloat16, interleave_forwards=True, **options)
seats = threading.Semaphore(args.threads)
encoding = threading.Lock()  # tokenizers are for one thread at a time


def draw(prompt: str, seed: int) -> bytes:
    """An image as PNG."""
    with encoding, torch.no_grad():
        embeds, pooled, _ = pipe.encode_prompt(prompt, None)
    # Threads share the models. Each has a scheduler of its own, which counts the steps.
    mine = FluxPipeline(**{**pipe.components, "scheduler": copy.deepcopy(pipe.scheduler)})
    mine.set_progress_bar_config(disable=True)
    image = mine(
        prompt_embeds=embeds,
        pooled_prompt_embeds=pooled,
        height=size,
        width=size,
        num_inference_steps=steps,
        guidance_scale=3.5,
        generator=torch.Generator().manual_seed(seed),
    ).images[0]
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        with seats:
            image = draw(query.get("prompt", ["a lighthouse in the fog"])[0], int(query.get("seed", ["0"])[0]))
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.end_headers()
        self.wfile.write(image)

    def log_message(self, *args: object) -> None:
        pass


def ask(seed: int) -> bytes:
    """Send a request to the server in this process."""
    query = urlencode({"prompt": "a lighthouse in the fog", "seed": seed})
    with urlopen(f"http://127.0.0.1:{server.server_port}/?{query}") as answer:
        image: bytes = answer.read()
        return image


server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
if args.tries:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with ThreadPoolExecutor(args.threads) as pool:
        images = [*pool.map(ask, range(args.threads))]
    server.shutdown()
    server.server_close()
    for name, handle in handles_of(pipe).items():
        print(f"\n{name}\n{handle.plan}")
    for number, image in enumerate(images):
        with open(args.output.format(number), "wb") as file:
            file.write(image)
        print(f"Wrote an image of {size} x {size} pixels in {steps} steps to {args.output.format(number)}.")
else:
    print(f"http://127.0.0.1:{server.server_port}/?prompt=a+lighthouse+in+the+fog")
    server.serve_forever()
