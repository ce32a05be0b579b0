from __future__ import annotations
import importlib, sys, time, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
def main():
    module = importlib.import_module(f"tests.matrix.cases.{sys.argv[1]}")
    for case in module.CASES:
        if sys.argv[2:] and case.name not in sys.argv[2:]:
            continue
        try:
            model = case.make()
            start = time.perf_counter()
            first = case.run(model)
            seconds = time.perf_counter() - start
            second = case.run(model)
            problems = []
            if not first: problems.append("has no tensor in its output")
            if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)): problems.append("differs between two calls")
            if not all(bool(torch.isfinite(a).all()) for a in first): problems.append("is not finite")
            if all(a.numel()==0 or bool((a==a.flatten()[0]).all()) for a in first): problems.append("constant")
            n = sum(p.numel() for p in model.parameters())
            if n > 2_000_000: problems.append(f"has {n:,} weights")
            if seconds > 1: problems.append(f"takes {seconds:.1f} s")
            print(f"{case.name}: {'; '.join(problems) or 'ok'} ({n:,} weights, {seconds:.2f} s)", flush=True)
        except Exception as error:
            print(f"{case.name}: FAILS {type(error).__name__}: {str(error)[:400]}", flush=True)
main()
