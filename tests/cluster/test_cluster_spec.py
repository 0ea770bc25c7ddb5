"""Cluster files, delays, and a worker's refusals to start."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from flowrt.base.errors import AuthenticationError, GraphError
from flowrt.cluster.cluster import ClusterSpec, LocalCluster, own_token, parse_address
from flowrt.worker import main

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_tasks_are_numbered_within_their_job() -> None:
    spec = ClusterSpec({"ps": ["127.0.0.1:7001"], "worker": ["node1:7002", "[::1]:7003"]})
    assert spec.tasks() == {
        "/job:ps/task:0": ("127.0.0.1", 7001),
        "/job:worker/task:0": ("node1", 7002),
        "/job:worker/task:1": ("::1", 7003),
    }


def test_a_cluster_file_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "cluster.toml", 'token_file = "/x"\nps = ["127.0.0.1:7001"]\nworker = ["127.0.0.1:7002"]\n')
    assert ClusterSpec.from_file(file) == ClusterSpec(
        {"ps": ("127.0.0.1:7001",), "worker": ("127.0.0.1:7002",)}, token_file="/x"
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ps = [", "cannot read the cluster file"),
        ("", "a cluster needs a task"),
        ('ps = "127.0.0.1:7001"', "expected a list of addresses"),
        ("ps = []", "expected a list of addresses"),
        ("ps = [7001]", "7001 is not an address"),
        ('ps = ["127.0.0.1"]', "'127.0.0.1' is not an address; write HOST:PORT"),
        ('ps = ["127.0.0.1:70000"]', "is not an address"),
        ('ps = ["127.0.0.1:0"]', "is not an address"),
        ('ps = ["a:1", "a:1"]', "/job:ps/task:0 and /job:ps/task:1 have the same address"),
        ('"p/s" = ["a:1"]', "'p/s' cannot name a job"),
        ('client = ["a:1"]', "'client' cannot name a job"),
        ('token_file = 3\nps = ["a:1"]', "token_file is a path"),
    ],
)
def test_what_is_no_cluster_file_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    file = write(tmp_path / "cluster.toml", text)
    with pytest.raises(GraphError, match=str(file)) as caught:
        ClusterSpec.from_file(file)
    assert complaint in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"nowhere\.toml: .*No such file"):
        ClusterSpec.from_file(tmp_path / "nowhere.toml")


def test_the_environment_names_a_file_or_holds_the_cluster(tmp_path: Path) -> None:
    file = write(tmp_path / "cluster.toml", 'ps = ["127.0.0.1:7001"]')
    spec = ClusterSpec({"ps": ["127.0.0.1:7001"]})
    assert ClusterSpec.from_env({"FLOWRT_CLUSTER": str(file)}) == spec
    assert ClusterSpec.from_env({"FLOWRT_CLUSTER": json.dumps({"ps": ["127.0.0.1:7001"]})}) == spec
    theirs = {"cluster": {"ps": ["127.0.0.1:7001"]}, "task": {"type": "ps", "index": 0}}
    assert ClusterSpec.from_env({"TF_CONFIG": json.dumps(theirs)}) == spec


@pytest.mark.parametrize("environ", [{}, {"FLOWRT_CLUSTER": "{"}, {"TF_CONFIG": "[]"}, {"TF_CONFIG": '{"cluster": 3}'}])
def test_an_environment_without_a_cluster_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(GraphError, match=r"FLOWRT_CLUSTER|TF_CONFIG"):
        ClusterSpec.from_env(environ)


@pytest.mark.parametrize("text", ["", ":1", "a:", "a:b", "a b:1", "::1:7001", "http://a:1", "a:1/x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(GraphError, match="is not an address"):
        parse_address(text)


def test_beyond_this_machine_a_secret_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWRT_TOKEN_FILE", raising=False)
    with pytest.raises(AuthenticationError, match=r"10\.0\.0\.1.*token_file"):
        _ = ClusterSpec({"ps": ["10.0.0.1:7001"]}).token


def test_a_users_own_token_is_made_once_and_kept_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWRT_TOKEN_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    token = ClusterSpec({"ps": ["127.0.0.1:7001"]}).token
    assert token == own_token()
    assert [p.name for p in (tmp_path / "flowrt").iterdir()] == ["token"]
    assert (tmp_path / "flowrt" / "token").stat().st_mode & 0o777 == 0o600


def test_a_local_cluster_knows_its_tasks_before_it_starts() -> None:
    with pytest.raises(GraphError, match="worker/task:1, which is not in the cluster"):
        LocalCluster(worker=1, delays={"/job:worker/task:1": "0.2"})
    with pytest.raises(GraphError, match=r"test_cluster_spec.py:\d+: 'slow' is not a delay"):
        LocalCluster(worker=1, delays={"/job:worker/task:0": "slow"})
    with pytest.raises(GraphError, match="needs a task"):
        LocalCluster()
    with pytest.raises(GraphError, match="'client' cannot name a job"):
        LocalCluster(client=1)


def test_delays_that_are_of_no_task_say_how_they_are_given() -> None:
    with pytest.raises(GraphError, match=r"test_cluster_spec.py:\d+: delays are given by task, .* got 'constant:1'"):
        LocalCluster(worker=1, delays="constant:1")  # type: ignore[arg-type]


# ── refusals of the worker ───────────────────────────────────────────────────────────────────────────────────────────


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a worker refuses to start."""
    assert main(["--job=ps", "--task=0", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("flowrt worker: ")
    assert said.err.count("\n") == 1
    return said.err


def test_a_worker_refuses_a_bad_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "cluster.toml", 'worker = ["127.0.0.1:7001"]')
    assert "nowhere.toml" in refusal(capsys, f"--cluster={tmp_path / 'nowhere.toml'}")
    assert "/job:ps/task:0 is not in the cluster, which has /job:worker/task:0" in refusal(capsys, f"--cluster={file}")


def test_a_worker_refuses_a_wider_bind_without_a_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLOWRT_TOKEN_FILE", raising=False)
    assert "beyond this machine, needs a secret: give --token-file" in refusal(capsys, "--bind=0.0.0.0:0")


def test_a_worker_refuses_a_token_it_cannot_keep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "token", "secret")
    os.chmod(file, 0o644)
    assert "others can read" in refusal(capsys, "--bind=127.0.0.1:0", f"--token-file={file}")
    assert "No such file" in refusal(capsys, "--bind=127.0.0.1:0", f"--token-file={tmp_path / 'none'}")


def test_a_worker_refuses_a_bad_delay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "token", "secret")
    os.chmod(file, 0o600)
    given = "--bind=127.0.0.1:0", f"--token-file={file}"
    assert "worker: --delay: 'slow' is not a delay: it has 'slow'" in refusal(capsys, *given, "--delay=slow")
    assert "worker: --delay: a delay, Constant: seconds" in refusal(capsys, *given, "--delay=nan")
    assert "No such file" in refusal(capsys, *given, f"--delay=@{tmp_path / 'none'}")
