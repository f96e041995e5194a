"""Trains nothing with a real DataLoader: `python trainer.py WORKERS`; prints what it measured itself."""

import json
import os
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

import gpufleet_loader


class Slow(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.tensor([float(index)])


loader = DataLoader(Slow(), batch_size=4, num_workers=int(sys.argv[1]))
waits = []
for _ in range(2):
    batches = iter(gpufleet_loader.watch(loader, name="train"))
    for step in range(len(loader)):
        began = time.perf_counter()
        batch = next(batches)
        if step:
            waits.append(time.perf_counter() - began)
        time.sleep(0.06)
    assert next(batches, None) is None
own = {"wait_s": sum(waits), "fetches": len(waits), "pid": os.getpid(), "torch": torch.__version__}
print(json.dumps(own), flush=True)
sys.stdin.read()
