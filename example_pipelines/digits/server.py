"""Serves a trained model over HTTP: `python -m example_pipelines.digits.server --model FILE --port 8000`.

`POST /predict` takes images and answers digits with probabilities; `GET /health` answers once the model is loaded, and names it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from example_pipelines.digits.files import file_sha256
from example_pipelines.digits.train import load_network, predict

IMAGES_MAX = 1000
Pixel = float
Row = list[Pixel]


class PredictRequest(BaseModel):
    """Images of 8 by 8 pixels with values from 0 (paper) to 1 (ink)."""

    model_config = ConfigDict(extra="forbid")
    images: list[list[Row]] = Field(min_length=1, max_length=IMAGES_MAX)


class PredictAnswer(BaseModel):
    digits: list[int]
    probabilities: list[float]
    model: str
    node: str
    replica: str


class HealthAnswer(BaseModel):
    status: str
    model: str
    node: str
    replica: str


def build_app(model: Path) -> FastAPI:
    network, digest = load_network(model), file_sha256(model)
    who = {
        "model": digest[:16],
        "node": os.environ.get("CRATER_NODE", "this machine"),
        "replica": os.environ.get("CRATER_TASK_ID", str(os.getpid())),
    }
    app = FastAPI(title="Handwritten digits", version=digest[:16])

    @app.get("/health")
    def health() -> HealthAnswer:
        return HealthAnswer(status="ok", **who)

    @app.post("/predict")
    def predict_digits(body: PredictRequest) -> PredictAnswer:
        images = _checked(body.images)
        probabilities = predict(network, images)
        return PredictAnswer(
            digits=probabilities.argmax(axis=1).tolist(), probabilities=probabilities.max(axis=1).round(4).tolist(), **who
        )

    return app


def _checked(images: list[list[Row]]) -> np.ndarray:
    for number, image in enumerate(images):
        if len(image) != 8 or any(len(row) != 8 for row in image):
            raise HTTPException(422, f"images[{number}] must have 8 rows of 8 pixels")
    array = np.asarray(images, dtype=np.float32)
    if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
        raise HTTPException(422, "images: pixels must be numbers from 0 to 1")
    return array


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="server.py", description="Serve a trained classifier of handwritten digits.")
    parser.add_argument("--model", type=Path, required=True, help="a file that train.py wrote")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=int,
        default=int(os.environ.get("CRATER_PORT", "8000")),
        help="default: CRATER_PORT, which Crater sets for a replica, else 8000",
    )
    options = parser.parse_args(argv)
    if not options.model.is_file():
        parser.error(f"--model: {options.model} is not a file")
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    uvicorn.run(build_app(options.model), host=options.host, port=options.port, log_level="info", access_log=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
