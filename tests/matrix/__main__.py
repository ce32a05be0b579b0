from __future__ import annotations
import importlib, sys, time, tempfile, traceback, warnings, logging
from pathlib import Path
warnings.simplefilter("ignore")
import torch, diffusers, transformers
diffusers.logging.set_verbosity_error(); transformers.logging.set_verbosity_error()
from group_offload import GroupOffloadError
from .arms import ARMS, Subject, NotApplicable
torch.set_num_threads(1)
import os
def main():
    module = importlib.import_module(f"tests.matrix.cases.{sys.argv[1]}")
    arms=os.environ.get("ARMS"); 
    for case in module.CASES:
        if sys.argv[2:] and case.name not in sys.argv[2:]: continue
        t=time.time()
        try: subject = Subject.of(case)
        except Exception as e:
            print(f"{case.name}: RESIDENT {type(e).__name__} {str(e)[:200]}"); continue
        out=[]
        for name, arm in ARMS.items():
            if arms and arms not in name: continue
            t0=time.time()
            with tempfile.TemporaryDirectory() as folder:
                try: arm(subject, Path(folder)); r="ok"
                except NotApplicable as e: r="-"
                except Exception as e:
                    r=f"{type(e).__name__}: {str(e)[:500]}"
                    if e.__cause__ is not None: r+=f" <- {type(e.__cause__).__name__}: {str(e.__cause__)[:300]}"
                    if os.environ.get("TB"): traceback.print_exc()
            out.append((name,r,time.time()-t0))
        print(case.name, f"{time.time()-t:.1f}s", " ".join(f"{r}({s:.1f})" for n,r,s in out if r in("ok","-")), flush=True)
        for n,r,s in out:
            if r not in ("ok","-"): print("   ##",n,r, flush=True)
main()
