"""`python -m testcluster VERB`: the test cluster's command line. `make cluster-up` and `make cluster-down` call it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from testcluster import addons, building, control, layout, life, preconditions
from testcluster.commands import CommandFailedError
from testcluster.layout import MOST_WORKERS, Cluster
from testcluster.namespaces import inside
from testcluster.node import environment
from testcluster.programs import OTHER_VERSIONS, ProgramMissingError, check_that_they_can_be_made, find


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.do(options) or 0)
    except (CommandFailedError, ProgramMissingError, control.RefusedError, KeyError) as problem:
        print(f"testcluster: {problem.args[0]}", file=sys.stderr)
        return 1
    except FileNotFoundError:
        print(f"testcluster: no cluster was started in {options.folder}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="testcluster", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=layout.default_folder(), help="where the cluster's files lie")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, do: object, text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text)
        made.set_defaults(do=do)
        return made

    verb("check", _check, "say whether this machine lets a cluster run")
    verb("machine", _machine, "say whether this machine can build what tests need, and whether a cluster can run on it")
    verb("programs", _programs, "build or unpack everything that is needed, and say where it lies")
    up = verb("up", _up, "start a cluster")
    up.add_argument("--workers", type=int, default=2, choices=range(1, MOST_WORKERS + 1), metavar="N")
    up.add_argument(
        "--packaged",
        action=argparse.BooleanOptionalAction,
        help="jobs start from the trainer's image: 6 GB, imported into every node; until --no-packaged or down",
    )
    apply = verb("apply", _apply, "kubectl apply, with jobs that mount the checkout where there is no trainer's image")
    apply.add_argument("files", nargs="+", type=Path, metavar="FILE")
    image = verb("image", _image, "build a target of the Dockerfile without a registry, and say where its archive is")
    image.add_argument("target", choices=["operator", "trainer"])
    verb("kubeconfig", _kubeconfig, "print where the kubeconfig of an administrator is")
    verb("trainer-image", _trainer_image, "print the trainer's image, if jobs start from it (--packaged); else nothing")
    verb("down", _down, "end it; images stay for the next time")
    verb("kill", _kill, "end a node as a power cut would").add_argument("node")
    verb("start", _start, "start a killed node again").add_argument("node")
    for name, text in (("stop-program", "kill a program of a node"), ("start-program", "start it again")):
        program = verb(name, _program, text)
        program.set_defaults(request=name.partition("-")[0])
        program.add_argument("node")
        program.add_argument("program", help="kube-apiserver, kubelet ...")
    command = verb("run", _run, "run a command within a node's namespaces")
    command.add_argument("node")
    command.add_argument("command", nargs=argparse.REMAINDER)
    archive = verb("import", _import, "import an image archive into the nodes")
    archive.add_argument("archive", type=Path)
    archive.add_argument("--node", help="into one node only")
    return parser


def _check(_options: argparse.Namespace) -> None:
    preconditions.check()
    print("a cluster can run here")


def _machine(_options: argparse.Namespace) -> None:
    print(check_that_they_can_be_made())
    try:
        _check(_options)
    except CommandFailedError as problem:
        print(f"no cluster of plain processes can run here: {problem}")


def _programs(_options: argparse.Namespace) -> None:
    programs = find(build=True, say=_say, cluster=True)
    paths = dict(sorted(programs.paths.items()))
    for age, version in OTHER_VERSIONS.items():
        paths[f"kube-apiserver {version}"] = find(build=True, say=_say, api_server=age).path("kube-apiserver")
    for name, path in paths.items():
        print(f"{name:26}{path}")


def _up(options: argparse.Namespace) -> None:
    cluster = life.up(options.folder, options.workers, _say, packaged=options.packaged)
    print("\n" + "".join(f"  {line}\n" for line in next_commands(cluster)))


def next_commands(cluster: Cluster) -> list[str]:
    """What a person types once a cluster is there."""
    folders = [str(cluster.programs.path(name).parent) for name in ("kubectl", "helm")]
    export = f"export KUBECONFIG={cluster.kubeconfig} PATH={':'.join(dict.fromkeys(folders))}:$PATH"
    applied = [f"kubectl apply -f examples/cluster/{name}.yaml" for name in ("storage", "quickstart")]
    if not cluster.packaged:
        applied = ["make cluster-apply  # storage.yaml and quickstart.yaml, with pods that mount the checkout"]
    return [export, *applied, "kubectl wait rlj/quickstart --for=condition=Finished --timeout=30m"]


def _apply(options: argparse.Namespace) -> None:
    # Not at the top: `check` runs before there is an environment.
    import yaml

    from testcluster.fitting import fitted

    cluster = layout.load(options.folder)
    if missing := [str(file) for file in options.files if not file.is_file()]:
        raise CommandFailedError(f"no such file: {', '.join(missing)}")
    documents = [item for file in options.files for item in yaml.safe_load_all(file.read_text()) if item]
    if not cluster.packaged:
        documents = fitted(documents, building.ROOT)
    items = {"apiVersion": "v1", "kind": "List", "items": documents}
    print(addons.Kubectl(cluster)("apply", "-f", "-", text=json.dumps(items)), end="")


def _image(options: argparse.Namespace) -> None:
    print(building.project_image(options.target, _say))


def _kubeconfig(options: argparse.Namespace) -> None:
    print(layout.load(options.folder).kubeconfig)


def _trainer_image(options: argparse.Namespace) -> None:
    cluster = layout.load(options.folder)
    if cluster.packaged:
        print(life.trainer_image(cluster))


def _down(options: argparse.Namespace) -> None:
    _say("the cluster is gone" if life.down(options.folder) else "no cluster runs")


def _kill(options: argparse.Namespace) -> None:
    life.kill(layout.load(options.folder).node(options.node))


def _start(options: argparse.Namespace) -> None:
    control.ask(layout.load(options.folder).socket, f"start {options.node}")


def _program(options: argparse.Namespace) -> None:
    node = layout.load(options.folder).node(options.node)
    control.ask(node.socket, f"{options.request} {options.program}")


def _run(options: argparse.Namespace) -> int:
    cluster = layout.load(options.folder)
    command = inside(_pid(cluster, options.node), *options.command)
    return subprocess.run(command, env=os.environ | environment(cluster)).returncode


def _import(options: argparse.Namespace) -> None:
    cluster = layout.load(options.folder)
    nodes = [cluster.node(options.node)] if options.node else cluster.nodes
    for node in nodes:
        life.bring(cluster, node, options.archive)


def _pid(cluster: Cluster, name: str) -> int:
    pid = control.listener_of(cluster.node(name).socket)
    if pid is None:
        raise KeyError(f"{name} doesn't run")
    return pid


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
