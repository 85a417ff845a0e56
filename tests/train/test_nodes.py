"""Two nodes on one machine: network namespaces with an Ethernet link, two processes each (gloo).

Both see the same folder, as nodes with a shared file system do.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_runs import assert_same_bits, trainer, write_recipe
from test_distributed import PLAIN, assert_alike, curve

from manyheads.recipes import read_recipe

# Kills the launcher and itself on one node, once.
KILLED = """
import os, pathlib, signal
from manyheads.train import loop

plain = loop.Trainer.step

def step(self, number):
    once = pathlib.Path({once!r})
    if (self.world.rank, number) == ({rank}, 4) and not once.exists():
        once.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, number)

loop.Trainer.step = step
from manyheads.cli import main
main()
"""


def _ip(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ip", *words], capture_output=True, check=False)


class Network:
    """Two namespaces, 10.77.0.1 and 10.77.0.2."""

    def __init__(self) -> None:
        self.names = [f"mh{os.getpid()}n{node}" for node in range(2)]
        self.links = [f"mh{os.getpid()}v{node}" for node in range(2)]

    def open(self) -> str:
        """Create them; returns the reason if that is not possible."""
        if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
            return "needs root and iproute2"
        (a, b), (v, w) = self.names, self.links
        commands = [["netns", "add", a], ["netns", "add", b]]
        peer = ["type", "veth", "peer", "name", w, "netns", b]
        commands.append(["link", "add", v, "netns", a, *peer])
        for node, (name, link) in enumerate(zip(self.names, self.links, strict=True), start=1):
            commands.append(["-n", name, "addr", "add", f"10.77.0.{node}/24", "dev", link])
            commands += [["-n", name, "link", "set", each, "up"] for each in ("lo", link)]
        results = [_ip(*command) for command in commands]
        errors = [result.stderr.decode().strip() for result in results if result.returncode]
        return errors[0] if errors else ""

    def close(self) -> None:
        for name in self.names:
            _ip("netns", "del", name)

    def start(self, node: int, output: Path, *words: object) -> "subprocess.Popen[bytes]":
        """torchrun on a node, with two processes."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        torchrun += ["--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-backend", "c10d"]
        torchrun += ["--rdzv-endpoint", "10.77.0.1:29500", "--rdzv-id", "test"]
        torchrun += ["--rdzv-conf", f"is_host={int(node == 0)},keep_alive_interval=1"]
        torchrun += ["--local-addr", f"10.77.0.{node + 1}"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.links[node],
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or a replaced node would not find it
            "MANYHEADS_TIMEOUT": "60",
        }
        with output.open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[node], *torchrun, *map(str, words)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    network = Network()
    reason = network.open()
    if reason:
        network.close()
        pytest.skip(f"no network namespaces: {reason}")
    yield network
    network.close()


def run_nodes(network: Network, folder: Path, *words: object, restarts: bool = False) -> str:
    """Run on both nodes; restart the second when it has died, if it may."""
    logs = [folder / f"node{node}.log" for node in range(2)]
    nodes = [network.start(node, logs[node], *words) for node in range(2)]
    deadline = time.monotonic() + 600
    try:
        if restarts:
            assert nodes[1].wait(600) != 0, "the node was not killed"
            nodes[1] = network.start(1, logs[1], *words)
        codes = [node.wait(max(1, deadline - time.monotonic())) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    output = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], output
    return output


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("corpus"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [(), ("train.parallel=fsdp", "train.shard=2"), ("train.parallel=fsdp",)],
    ids=["ddp", "hsdp", "fsdp"],
)
def test_two_nodes_train_as_one_process_does(
    network: Network, recipe: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    trainer(recipe, tmp_path / "one", *PLAIN).run()
    train = ("-m", "manyheads", "train", recipe, *PLAIN, *layout, "--out", tmp_path / "two")
    output = run_nodes(network, tmp_path, *train)
    assert "process group: 4 processes, 2 nodes, gloo, main" in output
    assert_alike(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_a_node_that_is_killed_and_started_again_changes_no_bits(
    network: Network, recipe: Path, tmp_path: Path
) -> None:
    settings = (*PLAIN, "train.parallel=fsdp", "model.dropout=0.1")
    train = ("-m", "manyheads", "train", recipe, *settings, "--out")
    run_nodes(network, tmp_path, *train, tmp_path / "whole")
    script = tmp_path / "killed.py"
    text = KILLED.format(once=str(tmp_path / "once"), rank=3)
    script.write_text(text, encoding="utf-8")
    words = (script, "train", recipe, *settings, "--out", tmp_path / "killed")
    output = run_nodes(network, tmp_path, *words, restarts=True)
    assert "resuming from step 4" in output
    assert "lost the others" in output
    assert_same_bits(tmp_path / "whole", tmp_path / "killed")
    assert curve(tmp_path / "whole") == curve(tmp_path / "killed")


def test_launch_files_of_the_documentation_parse() -> None:
    """The Slurm script as bash, the Kubernetes file as YAML with the fields of a job."""
    yaml = pytest.importorskip("yaml")
    page = (Path(__file__).parents[2] / "docs/scale.md").read_text(encoding="utf-8")
    [script] = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    parsed = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (parsed.returncode, parsed.stderr) == (0, "")
    [manifest] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    service, job = yaml.safe_load_all(manifest)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    [container] = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert f"--nnodes={job['spec']['completions']}" in container["args"]
    for words in (shlex.split(script.partition("srun")[2]), container["args"]):
        settings = [word for word in words if "=" in word and not word.startswith("-")]
        run = read_recipe("language", settings)
        assert (run.train.parallel, run.train.shard) == ("fsdp", 8)
