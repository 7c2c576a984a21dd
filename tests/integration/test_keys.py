"""The operator's token keys: made once, kept through everything, and what happens to running jobs when they change."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import pytest
import yaml
from fakes.heads import Play
from helm import CHART, call, program, render
from world import World, job_document

from rljob_operator.api_server import ApiServer
from rljob_operator.key_secret import KeySecret
from rljob_operator.tokens import TokenKey

GITOPS = ("Application", "HelmRelease")
pytestmark = pytest.mark.timeout(400)
SECRET = "operator-keys"


async def stored(world: World) -> list[str]:
    """The keys in the Secret, in order."""
    secret = await world.call("GET", f"/api/v1/namespaces/{world.namespace}/secrets/{SECRET}")
    return base64.b64decode(secret["data"]["keys"]).decode().split("\n")


async def test_replicas_that_start_together_make_one_key(world: World) -> None:
    async with ApiServer(world.plane.credentials()) as api:
        replicas = [KeySecret(api, world.namespace, SECRET, None) for _ in range(8)]
        rings = await asyncio.gather(*(replica.look() for replica in replicas))
    assert len({ring.newest.id for ring in rings}) == 1
    assert [key.key.decode() for key in rings[0].keys] == await stored(world)
    assert len(rings[0].newest.key) >= 32


async def test_a_deleted_secret_comes_back_with_every_key(world: World, tmp_path: Path) -> None:
    given = tmp_path / "given"
    async with ApiServer(world.plane.credentials()) as api:
        keeper = KeySecret(api, world.namespace, SECRET, given)
        for letter in "abc":
            given.write_text(letter * 40)
            await keeper.look()
        assert await stored(world) == ["c" * 40, "b" * 40, "a" * 40]
        await world.call("DELETE", f"/api/v1/namespaces/{world.namespace}/secrets/{SECRET}")
        await keeper.look()
    assert await stored(world) == ["c" * 40, "b" * 40, "a" * 40]


async def test_a_replica_learns_the_keys_of_another_and_forgets_none(world: World, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("a" * 40)
    second.write_text("b" * 40)
    async with ApiServer(world.plane.credentials()) as api:
        one = KeySecret(api, world.namespace, SECRET, first)
        other = KeySecret(api, world.namespace, SECRET, second)
        await one.look()
        await other.look()
        ring = await one.look()
    assert {key.key for key in ring.keys} == {b"a" * 40, b"b" * 40}


async def test_a_key_may_be_any_line(world: World, tmp_path: Path) -> None:
    """A pass phrase has spaces, and random bytes have anything."""
    given = tmp_path / "given"
    async with ApiServer(world.plane.credentials()) as api:
        for key in (b"correct horse battery staple is my long pass phrase", bytes(range(32, 64)) + b"\t\x0b\x0c\xff"):
            given.write_bytes(key)
            await KeySecret(api, world.namespace, SECRET, given).look()
            again = await KeySecret(api, world.namespace, SECRET, given).look()
            assert again.newest.key == key.strip()
        assert len(again.keys) == 2


async def test_a_damaged_secret_is_named(world: World) -> None:
    body = {
        "metadata": {"name": SECRET, "namespace": world.namespace},
        "data": {"keys": base64.b64encode(b"short").decode()},
    }
    await world.call("POST", f"/api/v1/namespaces/{world.namespace}/secrets", body)
    async with ApiServer(world.plane.credentials()) as api:
        with pytest.raises(ValueError, match=rf"entry 'keys' of the Secret {world.namespace}/{SECRET}: .* 5 bytes"):
            await KeySecret(api, world.namespace, SECRET, None).look()


async def test_a_changed_key_reaches_running_jobs_without_loss(world: World) -> None:
    keys = {"lease_namespace": world.namespace, "key_secret": SECRET}
    world.start_operator(token_key="a" * 64, identity="before", **keys)
    await world.apply(job_document("old"), Play(steps=None))
    await world.until_condition("old", "Running", "True", "Training")
    await world.stop_operator()

    world.start_operator(token_key="b" * 64, identity="after", **keys)
    await world.apply(job_document("new"), Play(steps=None))
    await world.until_condition("new", "Running", "True", "Training")
    # Steered as before: the driver of the old job hears what is wanted of it.
    await world.patch("old", {"rollout": {"replicas": 3}})
    await world.until_condition("old", "Resizing", "False", "AtSize")
    await world.until_condition("old", "Running", "True", "Training")
    clusters = await world.call("GET", f"/apis/ray.io/v1/namespaces/{world.namespace}/rayclusters")
    made_under = {
        item["metadata"]["name"]: item["metadata"]["annotations"]["rljob.dev/token-key"] for item in clusters["items"]
    }
    assert made_under == {"old-c1": TokenKey(b"a" * 64).id, "new-c1": TokenKey(b"b" * 64).id}
    assert world.heads.refused == []
    assert len(world.drivers("old")) == 1


async def test_a_lost_key_is_said_and_healthy_pods_are_left_alone(world: World) -> None:
    world.start_operator(token_key="a" * 64)
    await world.apply(job_document("job", deadlines={"progressSeconds": 10}), Play(steps=None))
    await world.until_condition("job", "Running", "True", "Training")
    await world.stop_operator()

    world.start_operator(token_key="b" * 64)
    job = await world.until_condition("job", "Running", "Unknown", "TokenRefused")
    (said,) = [item for item in job["status"]["conditions"] if item["type"] == "Running"]
    assert f"no longer has the token key {TokenKey(b'a' * 64).id}" in said["message"]
    await asyncio.sleep(11)
    await world.until_condition("job", "Running", "Unknown", "TokenRefused")
    await world.stop_operator()

    world.start_operator(token_key="a" * 64)
    await world.until_condition("job", "Running", "True", "Training")
    assert len(world.drivers("job")) == 1


@pytest.mark.parametrize("status", [401, 403])
async def test_a_driver_that_refuses_the_token_is_said_and_left_alone(world: World, status: int) -> None:
    """As what lies between operator and pods may, a service mesh for example: longer than a silence may be."""
    world.start_operator()
    await world.apply(job_document("job", deadlines={"progressSeconds": 10}), Play(steps=None))
    await world.until_condition("job", "Running", "True", "Training")
    world.heads.drivers_refuse = status
    job = await world.until_condition("job", "Running", "Unknown", "TokenRefused")
    (said,) = [item for item in job["status"]["conditions"] if item["type"] == "Running"]
    assert said["message"] == f"the driver does not accept the operator's token ({status})"
    await asyncio.sleep(11)
    await world.until_condition("job", "Running", "Unknown", "TokenRefused")
    world.heads.drivers_refuse = None
    await world.until_condition("job", "Running", "True", "Training")
    assert len(world.drivers("job")) == 1


async def test_a_priority_class_of_kueue_follows_the_job_s(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("job"), Play(steps=None))
    await world.until_condition("job", "Running", "True", "Training")
    name, clusters = "kueue.x-k8s.io/priority-class", f"/apis/ray.io/v1/namespaces/{world.namespace}/rayclusters/job-c1"

    async def has() -> bool:
        cluster = await world.call("GET", clusters)
        return bool(cluster["metadata"]["labels"].get(name) == wanted)

    for wanted in ("urgent", "later", None):
        change = {"metadata": {"labels": {name: wanted}}}
        await world.call("PATCH", world.path("job"), change, "application/merge-patch+json")
        await world.until(f"the priority {wanted}", has)
    assert len(world.drivers("job")) == 1


def test_what_the_gitops_page_shows_renders_the_same_again(tmp_path: Path) -> None:
    """To the byte, as the page says: Argo CD and Flux compare what they rendered with what they rendered before."""
    page = (CHART.parents[1] / "docs" / "operator" / "gitops.md").read_text()
    shown = [yaml.safe_load(block.partition("```")[0]) for block in page.split("```yaml\n")[1:]]
    application, release = ({document["kind"]: document for document in shown}[kind] for kind in GITOPS)
    rendered = []
    for values in (application["spec"]["source"]["helm"]["valuesObject"], release["spec"]["values"]):
        (file := tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
        once, again = (
            call(program(), "template", "rl", str(CHART), "--namespace", "rljob", "--values", str(file)) for _ in "12"
        )
        assert once.returncode == 0, once.stderr
        assert once.stdout == again.stdout
        rendered.append(once.stdout)
    assert "kind: RoleBinding\nmetadata:" in rendered[0]
    assert "team-a" in rendered[0]


def test_no_rendering_of_the_chart_draws_a_key() -> None:
    helm = program()
    for values in ([], ["--set=tokenKey.existingSecret=mine"]):
        once, again = render(helm, *values), render(helm, *values)
        assert once == again
        assert "Secret" not in [document["kind"] for document in once]
