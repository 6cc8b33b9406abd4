"""The loop as Dagster assets: each says what it needs, and Crater finds the place.

Files go below the directory of `DigitsFiles`, so that every step and every node sees the same ones.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from dagster import (
    AssetCheckResult,
    AssetCheckSpec,
    AssetExecutionContext,
    DefaultSensorStatus,
    MaterializeResult,
    MetadataValue,
    asset,
)

from crater_dagster import (
    AutoscaleRule,
    CraterResource,
    PipesCraterClient,
    build_autoscale_sensor,
    crater_tags,
    inference_service_asset,
)
from example_pipelines.digits import prepare
from example_pipelines.digits.files import DigitsFiles

GROUP = "digits"
PROJECT = "vision"
SEED = 7
EPOCHS = "6"
ACCURACY_MIN = 0.95
SERVICE = "digits"
BATCH_IMAGES = 30
TRAIN = Path(__file__).with_name("train.py")

SMALL = crater_tags(cpu=0.25, memory="768MiB", project=PROJECT, quota_policy="dev-quota")
WAITING = crater_tags(cpu=0.1, memory="768MiB", project=PROJECT, quota_policy="dev-quota")


@asset(group_name=GROUP, kinds={"numpy"}, op_tags=SMALL)
def raw_digits() -> MaterializeResult:
    """1,797 images of handwritten digits, 8 by 8 pixels, from scikit-learn."""
    images, labels = prepare.load_images()
    path = DigitsFiles().write_arrays("raw_digits", images=images, labels=labels)
    return MaterializeResult(metadata={"images": len(labels), "file": MetadataValue.path(str(path))})


@asset(
    group_name=GROUP,
    kinds={"numpy"},
    deps=[raw_digits],
    op_tags=crater_tags(cpu=0.5, memory="1GiB", pool=["cpu-pool", "memory-pool"], project=PROJECT, quota_policy="dev-quota"),
)
def features() -> MaterializeResult:
    """Scaled, split by class into training, validation and test images; the training images also shifted by a pixel."""
    files = DigitsFiles()
    raw = files.read_arrays("raw_digits")
    made = prepare.make_features(raw["images"], raw["labels"], SEED)
    path = files.write_arrays("features", **made)
    sizes = {part: len(made[f"{part}_labels"]) for part in prepare.PARTS}
    return MaterializeResult(metadata={**sizes, "file": MetadataValue.path(str(path))})


@asset(group_name=GROUP, kinds={"pytorch"}, deps=[features], op_tags=WAITING)
def trained_model(context: AssetExecutionContext, pipes_crater: PipesCraterClient) -> MaterializeResult:
    """Trained by the stand-alone train.py on half a GPU: the step itself only waits for it, and holds no GPU."""
    files = DigitsFiles()
    written = files.new_model_path(context.run.run_id)
    trained = pipes_crater.run(
        context=context,
        name="train.py",
        command=[
            "python",
            str(TRAIN),
            *("--data", str(files.arrays_path("features"))),
            *("--out", str(written)),
            *("--epochs", os.environ.get("CRATER_EXAMPLE_EPOCHS", EPOCHS)),
            *("--seed", str(SEED)),
        ],
        resources={"gpu": 0.5, "cpu": 0.75, "memory": "1GiB"},
        pool=["gpu-pool", "cpu-pool", "memory-pool"],
        quota_policy="training-quota",
    ).get_materialize_result()
    model = files.publish_model(written)
    return MaterializeResult(metadata={**(trained.metadata or {}), "file": MetadataValue.path(str(model))})


@asset(
    group_name=GROUP,
    kinds={"pytorch"},
    deps=[features, trained_model],
    op_tags=SMALL,
    check_specs=[AssetCheckSpec("accuracy_is_high", asset="evaluation", blocking=True)],
)
def evaluation() -> MaterializeResult:
    """Accuracy on images that the training never saw. Nothing is served that does not pass."""
    from example_pipelines.digits.train import load_network, predict

    files = DigitsFiles()
    data = files.read_arrays("features")
    predicted = predict(load_network(files.current_model()), data["test_images"]).argmax(axis=1)
    truth = data["test_labels"]
    accuracy = float((predicted == truth).mean())
    wrong = Counter(f"{true} read as {read}" for true, read in zip(truth, predicted, strict=True) if true != read)
    files.write_json(
        "evaluation",
        {"accuracy": accuracy, "test_images": len(truth), "model": files.current_model().name, "wrong": dict(wrong)},
    )
    passed = AssetCheckResult(
        check_name="accuracy_is_high",
        passed=accuracy >= ACCURACY_MIN,
        metadata={"accuracy": accuracy, "at_least": ACCURACY_MIN},
    )
    return MaterializeResult(
        metadata={"accuracy": accuracy, "test_images": len(truth), "wrong": MetadataValue.json(dict(wrong))},
        check_results=[passed],
    )


def _serve_the_current_model(_context: AssetExecutionContext) -> dict[str, Any]:
    """The model's name is the hash of its content: another model is another version of the service, and rolls it."""
    model = str(DigitsFiles().current_model())
    host = os.environ.get("CRATER_EXAMPLE_HOST", "127.0.0.1")
    server = "example_pipelines.digits.server"
    return {"command": ["python", "-m", server, "--model", model, "--host", host, "--port", "{port}"]}


digits_service = inference_service_asset(
    "digits_service",
    service_name=SERVICE,
    deps=[trained_model, evaluation],
    extra=_serve_the_current_model,
    replicas=2,
    resources={"cpu": 0.3, "memory": "768MiB"},
    health_path="/health",
    pool=["cpu-pool", "memory-pool"],
    project=PROJECT,
    quota_policy="inference-quota",
    op_tags=WAITING,
    group_name=GROUP,
    description="Two replicas on different nodes read digits over HTTP: POST /predict, GET /health.",
)

digits_autoscale = build_autoscale_sensor(
    SERVICE,
    AutoscaleRule(replicas_min=2, replicas_max=4),
    default_status=DefaultSensorStatus.RUNNING
    if os.environ.get("CRATER_EXAMPLE_AUTOSCALE") == "1"
    else DefaultSensorStatus.STOPPED,
)


@asset(group_name=GROUP, kinds={"numpy"}, deps=[features, digits_service], op_tags=SMALL)
def batch_predictions(crater: CraterResource) -> MaterializeResult:
    """Every test image through the service, batch by batch, its replicas in turn."""
    files = DigitsFiles()
    data = files.read_arrays("features")
    images, truth = data["test_images"], data["test_labels"]
    digits: list[int] = []
    answered: Counter[str] = Counter()
    with crater.call_service(SERVICE) as service:
        for first in range(0, len(images), BATCH_IMAGES):
            body = {"images": images[first : first + BATCH_IMAGES].tolist()}
            answer = service.request("POST", "/predict", json=body).raise_for_status().json()
            digits += answer["digits"]
            answered[f"{answer['replica']} on {answer['node']}"] += len(answer["digits"])
    accuracy = float((np.array(digits) == truth).mean())
    files.write_json("batch_predictions", {"accuracy": accuracy, "answered": dict(answered), "digits": digits})
    return MaterializeResult(
        metadata={"accuracy": accuracy, "images": len(digits), "answered": MetadataValue.json(dict(answered))}
    )


ASSETS = [raw_digits, features, trained_model, evaluation, digits_service, batch_predictions]
