"""Where the loop keeps its files, and how: arrays and results below one directory, each written complete or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

DATA_VARIABLE = "CRATER_EXAMPLE_DATA"
DEFAULT_DATA = ".demo/data"


class DigitsFiles:
    """The files of the loop below `root`, which every node of the loop must see under the same path."""

    def __init__(self, root: Path | str | None = None) -> None:
        self.root = Path(root or os.environ.get(DATA_VARIABLE) or DEFAULT_DATA).expanduser().absolute()

    def arrays_path(self, name: str) -> Path:
        return self.root / f"{name}.npz"

    def write_arrays(self, name: str, **arrays: np.ndarray) -> Path:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        write_whole(self.arrays_path(name), buffer.getvalue())
        return self.arrays_path(name)

    def read_arrays(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.arrays_path(name), allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}

    def write_json(self, name: str, content: dict[str, Any]) -> Path:
        path = self.root / f"{name}.json"
        write_whole(path, json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")
        return path

    def read_json(self, name: str) -> dict[str, Any]:
        return json.loads((self.root / f"{name}.json").read_text("utf-8"))

    def new_model_path(self, run_id: str) -> Path:
        """Where a training run writes before its model has a name."""
        return self.root / "models" / f"training-{run_id}.pt"

    def publish_model(self, written: Path) -> Path:
        """Give a trained model the name of its content and make it the current one. Equal weights are the same file."""
        path = written.with_name(f"digits-{file_sha256(written)[:16]}.pt")
        written.replace(path)
        self.write_json("models/current", {"file": path.name})
        return path

    def current_model(self) -> Path:
        """Raises FileNotFoundError before the first training."""
        return self.root / "models" / self.read_json("models/current")["file"]


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, content: bytes) -> None:
    """The file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
