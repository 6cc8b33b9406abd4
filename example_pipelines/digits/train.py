"""Train a small convolutional network on images of digits: `python train.py --data features.npz --out model.pt --epochs 15`.

Stands alone: it knows neither Crater nor the pipeline. Under Dagster Pipes its progress goes into the run; else it is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

MIB = 1024**2
SIDE_PIXELS = 8
Say = Callable[[str], None]


def build_network() -> nn.Sequential:
    """Images of (n, 1, 8, 8), values 0 to 1, in; ten scores an image out."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def load_network(path: Path) -> nn.Sequential:
    """The network with the weights of a file that this module wrote, ready to predict on the CPU."""
    network = build_network()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network.eval()


def predict(network: nn.Module, images: np.ndarray) -> np.ndarray:
    """Probabilities of (n, 10) for images of (n, 8, 8)."""
    with torch.inference_mode():
        scores = network(torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, SIDE_PIXELS, SIDE_PIXELS))
        return torch.softmax(scores, dim=1).numpy()


def train(data: dict[str, np.ndarray], epochs: int, batch_size: int, seed: int, device: torch.device, say: Say) -> dict[str, Any]:
    """Train and keep the weights of the epoch that did best on the validation images."""
    random.seed(seed)
    torch.manual_seed(seed)
    network = build_network().to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3, weight_decay=1e-5)
    images = torch.as_tensor(data["train_images"], dtype=torch.float32).unsqueeze(1).to(device)
    labels = torch.as_tensor(data["train_labels"], dtype=torch.int64).to(device)
    order = torch.Generator().manual_seed(seed)
    best_accuracy, best_epoch, best_weights = -1.0, 0, network.state_dict()
    for epoch in range(1, epochs + 1):
        network.train()
        losses: list[float] = []
        for rows in torch.randperm(len(labels), generator=order).split(batch_size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        accuracy = _accuracy(network, data["validation_images"], data["validation_labels"], device)
        if accuracy > best_accuracy:
            best_accuracy, best_epoch = accuracy, epoch
            best_weights = {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}
        say(f"epoch {epoch:2}/{epochs}  loss {np.mean(losses):.4f}  validation accuracy {accuracy:.4f}")
    return {"weights": best_weights, "validation_accuracy": best_accuracy, "best_epoch": best_epoch}


def _accuracy(network: nn.Module, images: np.ndarray, labels: np.ndarray, device: torch.device) -> float:
    network.eval()
    with torch.inference_mode():
        scores = network(torch.as_tensor(images, dtype=torch.float32).unsqueeze(1).to(device))
    return float((scores.argmax(dim=1).cpu().numpy() == labels).mean())


def choose_device(wanted: str) -> torch.device:
    """`auto` takes CUDA where there is one, and keeps to the memory of the share that the environment names."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else torch.device(wanted)
    share_mib = int(os.environ.get("CRATER_GPU_MEMORY_MIB", "0"))
    if device.type == "cuda" and share_mib:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share_mib * MIB / total), device)
    return device


@contextlib.contextmanager
def reporting() -> Iterator[tuple[Say, Callable[[dict[str, Any]], None]]]:
    """How to tell progress and results: into the Dagster run under Pipes, else on standard output."""
    if "DAGSTER_PIPES_CONTEXT" not in os.environ:
        yield (lambda line: print(line, flush=True)), (lambda result: print(result, flush=True))
        return
    from dagster_pipes import open_dagster_pipes

    with open_dagster_pipes() as pipes:
        yield pipes.log.info, lambda result: pipes.report_asset_materialization(metadata=result)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train.py", description="Train a classifier of handwritten digits.")
    parser.add_argument("--data", type=Path, required=True, help="features.npz with train_ and validation_ images and labels")
    parser.add_argument("--out", type=Path, required=True, help="where the weights go; the file appears complete or not at all")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training images (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images a step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="the same seed gives the same model (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is one")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: OMP_NUM_THREADS, else PyTorch's choice)")
    options = parser.parse_args(argv)
    if options.epochs < 1 or options.batch_size < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    if not options.data.is_file():
        parser.error(f"--data: {options.data} is not a file")
    return options


def main(argv: list[str] | None = None) -> int:
    options = _arguments(argv)
    if options.threads > 0:
        torch.set_num_threads(options.threads)
    with np.load(options.data, allow_pickle=False) as archive:
        data = {name: archive[name] for name in archive.files}
    with reporting() as (say, report):
        device = choose_device(options.device)
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        say(f"{len(data['train_labels'])} images on {where}, {options.epochs} epochs, seed {options.seed}")
        result = train(data, options.epochs, options.batch_size, options.seed, device, say)
        buffer = io.BytesIO()  # A file's own name would go into the archive, and equal models would differ.
        torch.save(result["weights"], buffer)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        partial = options.out.with_name(f".{options.out.name}.{os.getpid()}")
        partial.write_bytes(buffer.getvalue())
        partial.replace(options.out)
        report(
            {
                "device": str(device),
                "epochs": options.epochs,
                "best_epoch": result["best_epoch"],
                "validation_accuracy": result["validation_accuracy"],
                "training_images": len(data["train_labels"]),
            }
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
