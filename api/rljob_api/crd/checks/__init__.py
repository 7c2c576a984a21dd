"""The rules of ``rljob_api.rules`` in CEL, so that ``kubectl apply`` refuses what ``rljob validate`` refuses.

Each entry names the rule that it expresses; the files mirror those of the rules. Rules that CEL cannot express are
listed with the reason in ``NOT_IN_CEL``; they become the condition Accepted=False.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rljob_api.crd.checks import algorithm, data, lifecycle, pipeline, pods, pools
from rljob_api.crd.checks.check import Check

NOT_IN_CEL: Mapping[str, str] = {
    "tokenizer_characters_differ": "CEL cannot take text apart into characters at a bounded cost",
    "reward_sources_exist": "the default names of sources are made from paths",
    "every_source_has_a_reward": "the default names of sources are made from paths",
    "engine_args_are_for_vllm": "the content of engineArgs is hidden from CEL",
    "engine_args_exist": "the content of engineArgs is hidden from CEL",
    "engine_args_leave_ours_alone": "the content of engineArgs is hidden from CEL",
    "estimator_takes_no_negative_terms": "the content of params is hidden from CEL",
    "mounts_have_volumes": "the content of volumes is hidden from CEL",
    "volumes_hold_no_credentials": "the content of volumes is hidden from CEL",
    "template_mount_paths_are_plain": "the content of the template is hidden from CEL",
    "templates_are_well_formed": "the content of the template is hidden from CEL",
    "templates_leave_ray_alone": "the content of the template is hidden from CEL",
    "template_variables_leave_ours_alone": "the content of the template is hidden from CEL",
    "template_labels_have_own_domains": "the content of the template is hidden from CEL",
    "template_gpus_are_counted_once": "the content of the template is hidden from CEL",
    "template_volumes_have_own_names": "the content of the template is hidden from CEL",
    "template_mounts_leave_ours_alone": "the content of the template is hidden from CEL",
    "variables_differ": "the list is a map by name: the API server itself refuses duplicates",
    "pull_secrets_differ": "the list is a map by name: the API server itself refuses duplicates",
    "validation_names_differ": "the list is a map by name: the API server itself refuses duplicates",
    "name_leaves_room_for_children": "bounds of metadata.name stand in the schema",
    "labels_of_kueue_are_understood": "rules see no labels of the object itself",
    "name_is_a_dns_label": "bounds of metadata.name stand in the schema",
    "pods_pass_a_dry_run": "the API server says it of the pods themselves, of which the operator makes a dry run",
    "images_are_references": "the content of the template is hidden from CEL",
}
PARTLY_IN_CEL: Mapping[str, str] = {
    "patterns_compile": "Python's regular expressions have more than those of CEL, which judges what they share",
}
"""Rules that CEL expresses for most jobs, with the reason why not for all."""
ON_THE_PODS = frozenset({"pods_pass_a_dry_run"})
"""Rules about what the API server refuses in the pods of a job, if not in the job."""


def checks() -> Iterator[Check]:
    """All validations, in the order of the rules."""
    for topic in (data, algorithm, pipeline, pools, pods, lifecycle):
        yield from topic.checks()
