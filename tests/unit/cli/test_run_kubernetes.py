"""`ronde run --cluster kubernetes`: what the options make of the Pods, and contradictions among them."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from ronde.cli import main
from ronde.cli.options import read_options, words_of
from ronde.cli.run_arguments import OPTIONS, parse_arguments
from ronde.cli.run_kubernetes import describe_pods
from ronde.errors import UsageError
from ronde.launch.kubernetes.manifest import JOB_SET, PodJob

ON_KUBERNETES = ["--cluster", "kubernetes", "--image", "lab/train"]


def job_of(*words: str, **variables: str) -> PodJob:
    environment = {name: text for name, text in variables.items() if name.startswith("PET_")}
    return describe_pods(parse_arguments([*ON_KUBERNETES, *words], environment), variables)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["run", *ON_KUBERNETES, *words]) == 0
    return json.loads(capsys.readouterr().out)["items"]


def test_pods_run_the_same_command_without_what_is_for_this_machine() -> None:
    job = job_of(
        "--nnodes", "2:4", "--gpus", "8", "--namespace", "lab", "--detach", "train.py", "--gpus", "1"
    )
    assert job.command == (
        *("ronde", "run", "--nproc-per-node", "8", "--nnodes", "2:4"),
        *("train.py", "--gpus", "1"),
    )
    assert (job.least, job.most, job.gpus, job.namespace, job.image) == (2, 4, 8, "lab", "lab/train")
    assert re.fullmatch(r"train-[0-9a-f]{6}", job.name)
    assert job_of("train.py").command == ("ronde", "run", "--nnodes", "1", "train.py")
    assert job_of("train.py").name != job_of("train.py").name
    assert re.fullmatch(r"job-3-digits-[0-9a-f]{6}", job_of("-m", "3_digits.train").name)


def test_options_of_every_source_reach_the_pods(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "options.yaml"
    file.write_text("params:\n  fusion_threshold_mb: 32\nstall_check:\n  enabled: false\n")
    command = job_of("--config-file", str(file), "-np", "4", "-m", "train", PET_MAX_RESTARTS="3").command
    text = " ".join(command)
    assert "--num-proc 4" in text
    assert "--max-restarts 3" in text
    assert "--fusion-threshold-mb 32" in text
    assert "--config-file" not in text
    given = parse_arguments(command[2:], {}).given
    assert given["--stall-check"].value is False
    assert list(command[2:]) == [*words_of(given, OPTIONS), "train"]


def test_options_of_several_words_stay_several() -> None:
    given, _ = read_options(["--blacklist-cooldown-range", "1", "9"], OPTIONS)
    assert words_of(given, OPTIONS) == ["--blacklist-cooldown-range", "1", "9"]


def test_quantities_and_kinds() -> None:
    job = job_of(
        *("--cpus", "500m", "--memory", "64Gi", "--shm-size", "8Gi", "--job-name", "digits"),
        *("--kubernetes-kind", "jobset", "--shutdown-timeout", "120", "train.py"),
    )
    assert (job.cpus, job.memory, job.shared_memory, job.name) == ("500m", "64Gi", "8Gi", "digits")
    assert job.kind == JOB_SET
    assert job.grace_s > 120


def test_exported_variables_have_the_values_of_this_environment() -> None:
    job = job_of("-x", "TOKEN,HF_HOME", "train.py", TOKEN="hidden", HF_HOME="/hf", HOME="/root")
    assert job.variables == {"TOKEN": "hidden", "HF_HOME": "/hf"}
    assert "hidden" not in " ".join(job.command)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-H a:2 train.py", "-H and --cluster kubernetes contradict each other"),
        ("--rdzv-endpoint a:1 train.py", "--rdzv-endpoint and --cluster kubernetes contradict each other"),
        ("-x NOT_SET train.py", "-x NOT_SET: the environment has no such variable"),
        ("--nnodes 4:2 train.py", "--nnodes 4:2 is invalid|contradicts itself"),
        ("--memory much train.py", "--memory much is invalid: expected a quantity"),
        ("--namespace Lab train.py", "--namespace Lab is invalid"),
        ("-n 2 --nproc-per-node 4 train.py", "contradict each other"),
    ],
)
def test_contradictions_are_found_before_anything_is_submitted(words: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        job_of(*words.split())


def test_an_image_is_needed_and_options_of_kubernetes_need_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--cluster", "kubernetes", "train.py"]) == 2
    assert "needs an image with Ronde and the program: add --image" in capsys.readouterr().err
    assert main(["run", "--image", "lab/train", "true"]) == 2
    assert "--image needs --cluster kubernetes: add it" in capsys.readouterr().err
    assert main(["run", *ON_KUBERNETES, "--job-name", "Digits", "--dry-run", "train.py"]) == 2
    assert "RFC 1123" in capsys.readouterr().err


def test_a_dry_run_shows_no_secret_and_a_file_is_for_this_user_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hidden")
    shown = printed(capsys, "-x", "TOKEN", "--dry-run", "train.py")
    assert shown[2]["stringData"] == {"job.key": "(secret)", "TOKEN": "(secret)"}
    file = tmp_path / "job.json"
    file.touch(0o644)
    assert main(["run", *ON_KUBERNETES, "-x", "TOKEN", "--manifest", str(file), "train.py"]) == 0
    assert f"kubectl create -f {file}" in capsys.readouterr().err
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    written = json.loads(file.read_text())["items"][2]["stringData"]
    assert written["TOKEN"] == "hidden"
    assert re.fullmatch(r"[0-9a-f]{64}", written["job.key"])
    assert printed(capsys, "--manifest", "-", "train.py")[2]["stringData"]["job.key"] != written["job.key"]


def test_patches_are_yaml_or_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    yaml, broken = tmp_path / "pods.yaml", tmp_path / "broken.json"
    yaml.write_text("kind: Pod\nspec: {nodeSelector: {gpu: h200}}\n---\nkind: Job\nspec: {suspend: true}\n")
    job = printed(capsys, "--patch", str(yaml), "--dry-run", "train.py")[0]
    assert job["spec"]["suspend"] is True
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "h200"}
    broken.write_text('{"kind": "Job", "spec": {"suspend": true}}', encoding="utf-8-sig")
    assert printed(capsys, "--patch", str(broken), "--dry-run", "train.py")[0]["spec"]["suspend"] is True
    broken.write_text("{")
    for path, says in ((broken, "is not JSON"), (tmp_path / "none.yaml", "cannot read the patch")):
        assert main(["run", *ON_KUBERNETES, "--patch", str(path), "--dry-run", "train.py"]) == 2
        assert says in capsys.readouterr().err
