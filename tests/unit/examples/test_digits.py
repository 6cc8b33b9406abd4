"""The digits loop without Dagster: how the images are split, what training writes, what the server answers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from example_pipelines.digits import prepare, train
from example_pipelines.digits.files import DigitsFiles, file_sha256, write_whole
from example_pipelines.digits.server import build_app

TRAIN = Path(train.__file__)


def ask(app: FastAPI, method: str, path: str, body: object = None) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(send())


@pytest.fixture(scope="module")
def raw() -> tuple[np.ndarray, np.ndarray]:
    return prepare.load_images()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, raw: tuple[np.ndarray, np.ndarray]) -> tuple[DigitsFiles, Path]:
    files = DigitsFiles(tmp_path_factory.mktemp("digits"))
    files.write_arrays("features", **prepare.make_features(*raw, seed=7))
    model = files.new_model_path("a")
    assert train.main(["--data", str(files.arrays_path("features")), "--out", str(model), "--epochs", "2", "--threads", "1"]) == 0
    return files, files.publish_model(model)


def test_no_image_is_in_two_parts_and_none_is_left_out(raw: tuple[np.ndarray, np.ndarray]):
    rows = prepare.split_rows(raw[1], seed=7)
    together = np.concatenate(list(rows.values()))
    assert sorted(together) == list(range(len(raw[1])))


def test_every_part_has_the_same_share_of_each_digit(raw: tuple[np.ndarray, np.ndarray]):
    labels = raw[1]
    rows = prepare.split_rows(labels, seed=7)
    for digit in range(10):
        of_digit = (labels == digit).sum()
        assert abs((labels[rows["test"]] == digit).sum() - 0.2 * of_digit) <= 1


def test_the_same_seed_gives_the_same_split_and_another_seed_another(raw: tuple[np.ndarray, np.ndarray]):
    same, again, other = (prepare.split_rows(raw[1], seed)["test"] for seed in (7, 7, 8))
    assert np.array_equal(same, again)
    assert not np.array_equal(same, other)


def test_only_training_images_are_multiplied(raw: tuple[np.ndarray, np.ndarray]):
    features = prepare.make_features(*raw, seed=7)
    rows = prepare.split_rows(raw[1], seed=7)
    assert len(features["train_labels"]) == len(prepare.SHIFTS) * len(rows["train"])
    assert np.array_equal(features["test_images"], raw[0][rows["test"]] / 16)


def test_a_shift_moves_ink_and_leaves_paper_behind():
    image = np.zeros((1, 8, 8), dtype=np.float32)
    image[0, 7, 0] = 1.0
    assert prepare.shifted(image, -1, 1)[0, 6, 1] == 1.0
    assert prepare.shifted(image, 1, 0).sum() == 0.0


def test_two_epochs_already_read_most_digits_that_training_never_saw(trained: tuple[DigitsFiles, Path]):
    files, model = trained
    features = files.read_arrays("features")
    probabilities = train.predict(train.load_network(model), features["test_images"])
    assert (probabilities.argmax(axis=1) == features["test_labels"]).mean() > 0.9
    assert np.allclose(probabilities.sum(axis=1), 1.0, atol=1e-5)


def test_the_same_training_twice_is_the_same_file(trained: tuple[DigitsFiles, Path]):
    files, model = trained
    again = files.new_model_path("b")
    train.main(["--data", str(files.arrays_path("features")), "--out", str(again), "--epochs", "2", "--threads", "1"])
    assert file_sha256(again) == file_sha256(model)
    assert files.publish_model(again) == model == files.current_model()
    assert model.name == f"digits-{file_sha256(model)[:16]}.pt"


def test_train_runs_by_itself_and_prints_its_progress(trained: tuple[DigitsFiles, Path], tmp_path: Path):
    files, _ = trained
    command = [
        sys.executable,
        str(TRAIN),
        "--data",
        str(files.arrays_path("features")),
        "--out",
        "model.pt",
        "--epochs",
        "1",
        "--threads",
        "1",
    ]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert "epoch  1/1" in ran.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--data", "nowhere.npz", "--out", "m"], "is not a file"), (["--out", "m"], "--data")]
)
def test_train_says_which_argument_is_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        train.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_server_names_its_model_and_reads_digits(trained: tuple[DigitsFiles, Path]):
    files, model = trained
    features = files.read_arrays("features")
    app = build_app(model)
    health = ask(app, "GET", "/health").json()
    assert health["status"] == "ok"
    assert health["model"] == file_sha256(model)[:16]
    answer = ask(app, "POST", "/predict", {"images": features["test_images"][:5].tolist()}).json()
    assert answer["digits"] == features["test_labels"][:5].tolist()
    assert answer["model"] == health["model"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"images": []}, "at least 1 item"),
        ({"images": [[[0.0] * 8] * 7]}, "8 rows of 8 pixels"),
        ({"images": [[[2.0] * 8] * 8]}, "from 0 to 1"),
        ({"images": [[["x"] * 8] * 8]}, "number"),
        ({"pictures": []}, "pictures"),
    ],
)
def test_the_server_refuses_what_is_no_image(trained: tuple[DigitsFiles, Path], body: object, said: str):
    answer = ask(build_app(trained[1]), "POST", "/predict", body)
    assert answer.status_code == 422
    assert said in answer.text


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path):
    target = tmp_path / "there" / "file"
    write_whole(target, b"one")
    with pytest.raises(TypeError):
        write_whole(target, "no bytes")  # type: ignore[arg-type]
    assert target.read_bytes() == b"one"
    assert [path.name for path in target.parent.iterdir()] == ["file"]
