"""Rules about spec.algorithm.rolloutCorrection."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.correction_presets import CORRECTION_PRESETS
from rljob_api.rules import cel
from rljob_api.rules.cel import ALGORITHM, CORRECTION, SPEC, Cel, one_of
from rljob_api.rules.registry import Job, rule
from rljob_api.violations import Violation

WEIGHTS = (*CORRECTION, "weights")
REJECTION = (*CORRECTION, "rejection", "[]")
_GIVEN = "self.algorithm.rolloutCorrection"
_REJECTS = f"(has({_GIVEN}.veto) || has({_GIVEN}.rejection) && size({_GIVEN}.rejection) > 0)"


@rule(
    cel=Cel(
        SPEC,
        cel.brief(_GIVEN, f"!(has({_GIVEN}.weights) || {_REJECTS}) || !{cel.IS_WITHOUT_CORRECTION}"),
        "weights, rejection and veto have no effect with mode none; set mode: decoupled (or bypass), or remove them",
        ".algorithm.rolloutCorrection",
    )
)
def correction_needs_a_mode(job: Job) -> Iterator[Violation]:
    given, mode = job.spec.algorithm.rollout_correction, job.resolved.algorithm.rollout_correction.mode
    idle = [name for name in ("weights", "rejection", "veto") if getattr(given, name)]
    if mode == "none" and idle:
        yield Violation(
            "spec.algorithm.rolloutCorrection",
            f"{' and '.join(idle)} {'have' if len(idle) > 1 else 'has'} no meaning with mode none",
            f"set mode: decoupled (or bypass), or remove {'them' if len(idle) > 1 else 'it'}",
        )


@rule(
    cel=[
        Cel(
            CORRECTION,
            "!has(self.preset) || !has(self.mode) || self.mode == (self.preset.startsWith('bypass') ? 'bypass' : "
            "'decoupled')",
            "the preset sets the mode; remove it",
            ".mode",
        ),
        Cel(
            ALGORITHM,
            "!has(self.rolloutCorrection.preset) || !self.rolloutCorrection.preset.startsWith('bypass') || "
            "has(self.policyLoss.type) && self.policyLoss.type == "
            "(self.rolloutCorrection.preset.startsWith('bypass_ppo') ? 'bypassPpoClip' : 'bypassReinforce')",
            "needs policyLoss.type: bypassPpoClip for bypass_ppo..., bypassReinforce for bypass_pg...; set it",
            ".rolloutCorrection.preset",
        ),
    ]
)
def correction_preset_has_its_mode_and_loss(job: Job) -> Iterator[Violation]:
    given, loss = job.spec.algorithm.rollout_correction, job.resolved.algorithm.policy_loss.type
    if given.preset is None:
        return
    named = CORRECTION_PRESETS[given.preset]
    if given.mode not in (None, named.mode):
        yield Violation(
            "spec.algorithm.rolloutCorrection.mode",
            f"the correction preset {given.preset} is defined with mode {named.mode}, not {given.mode}",
            "remove it, or the preset",
        )
    if named.policy_loss not in (None, loss):
        yield Violation(
            "spec.algorithm.rolloutCorrection.preset",
            f"{given.preset} is defined with the loss {named.policy_loss}, not {loss}",
            f"set policyLoss.type: {named.policy_loss}, or choose another preset",
        )


@rule(
    cel=Cel(
        SPEC,
        cel.brief(
            _GIVEN,
            f"!{cel.IS_BYPASS} || (!{_REJECTS} || {cel.loss_in('self.algorithm', cel.BYPASSING)}) && "
            f"(!has({_GIVEN}.weights) || {cel.loss_in('self.algorithm', ['bypassReinforce'])})",
        ),
        "with mode bypass the loss does not apply them; set mode: decoupled, or use the loss bypassReinforce "
        "(bypassPpoClip without weights)",
        ".algorithm.rolloutCorrection",
    )
)
def bypass_corrects_in_its_losses(job: Job) -> Iterator[Violation]:
    """No third policy, hence nothing to correct before the loss."""
    given, algorithm = job.spec.algorithm.rollout_correction, job.resolved.algorithm
    loss = algorithm.policy_loss.type
    if algorithm.rollout_correction.mode != "bypass":
        return
    idle = ["weights"] if given.weights and loss != "bypassReinforce" else []
    if not job.policy_loss.needs_bypass:
        idle += [name for name in ("rejection", "veto") if getattr(given, name)]
    if idle:
        yield Violation(
            "spec.algorithm.rolloutCorrection",
            f"with mode bypass the loss {loss} does not apply {' and '.join(idle)}",
            "set mode: decoupled, or use the loss bypassReinforce (bypassPpoClip without weights)",
        )


@rule(
    cel=Cel(
        SPEC,
        cel.brief(_GIVEN, f"!{cel.loss_in('self.algorithm', cel.BYPASSING)} || {cel.IS_BYPASS}"),
        "the loss needs mode bypass; set it, or use another policyLoss.type",
        ".algorithm.rolloutCorrection.mode",
    )
)
def bypass_losses_need_bypass(job: Job) -> Iterator[Violation]:
    algorithm = job.resolved.algorithm
    if job.policy_loss.needs_bypass and algorithm.rollout_correction.mode != "bypass":
        yield Violation(
            "spec.algorithm.rolloutCorrection.mode",
            f"the loss {algorithm.policy_loss.type} needs mode bypass, not {algorithm.rollout_correction.mode}",
            "set mode: bypass, or use another policyLoss.type",
        )


@rule(
    cel=Cel(
        WEIGHTS,
        "self.high >= 1.0",
        "would scale down the weights of identical policies, which are 1; use 1 or more (2 is usual)",
        ".high",
    )
)
def weight_cap_is_at_least_one(job: Job) -> Iterator[Violation]:
    weights = job.spec.algorithm.rollout_correction.weights
    if weights and weights.high < 1:
        yield Violation(
            "spec.algorithm.rolloutCorrection.weights.high",
            f"{weights.high:g} would scale down the weights of identical policies, which are 1",
            "use 1 or more (2 is usual)",
        )


@rule(cel=Cel(WEIGHTS, "!self.clamp || has(self.low)", "needs low; set it", ".clamp"))
def clamped_weights_have_a_lower_bound(job: Job) -> Iterator[Violation]:
    weights = job.spec.algorithm.rollout_correction.weights
    if weights and weights.clamp and weights.low is None:
        yield Violation(
            "spec.algorithm.rolloutCorrection.weights.clamp",
            "has no meaning without low: larger weights are cut to high anyway",
            "set low, or remove it",
        )


@rule(
    cel=[
        Cel(
            REJECTION,
            "self.statistic == 'k1' || !has(self.low)",
            "only k1 has a lower bound; remove it",
            ".low",
        ),
        Cel(
            REJECTION,
            "self.statistic != 'k1' || self.high > 1.0",
            "would reject identical policies, whose ratio is 1; use more than 1",
            ".high",
        ),
        Cel(
            REJECTION,
            "self.statistic != 'k1' || self.high <= 1.0 || !has(self.low) || self.low < 1.0",
            "would reject identical policies, whose ratio is 1; use less than 1",
            ".low",
        ),
        Cel(
            REJECTION,
            "self.statistic != 'tv' || self.over == 'sequenceSum' || self.high < 1.0",
            "never rejects: no two probabilities are further apart than 1; use less than 1",
            ".high",
        ),
    ]
)
def rejection_bounds_make_sense(job: Job) -> Iterator[Violation]:
    for index, rejection in enumerate(job.spec.algorithm.rollout_correction.rejection):
        path = f"spec.algorithm.rolloutCorrection.rejection[{index}]"
        if rejection.statistic != "k1":
            if rejection.low is not None:
                yield Violation(
                    f"{path}.low", f"{rejection.statistic} is never negative and has no lower bound", "remove it"
                )
            if rejection.statistic == "tv" and rejection.over != "sequenceSum" and rejection.high >= 1:
                yield Violation(
                    f"{path}.high",
                    f"{rejection.high:g} never rejects: no two probabilities are further apart than 1",
                    "use less than 1",
                )
        elif rejection.high <= 1:
            yield Violation(
                f"{path}.high",
                f"{rejection.high:g} would reject identical policies, whose ratio is 1",
                "use more than 1",
            )
        elif rejection.low is not None and rejection.low >= 1:
            yield Violation(
                f"{path}.low", f"{rejection.low:g} would reject identical policies, whose ratio is 1", "use less than 1"
            )


@rule(
    cel=Cel(
        REJECTION,
        "self.statistic != 'k1' || self.over != 'sequenceMax'",
        "the largest k1 of a sequence does not detect small ratios; use k2 or k3 with sequenceMax",
        ".over",
    )
)
def largest_k1_is_no_criterion(job: Job) -> Iterator[Violation]:
    for index, rejection in enumerate(job.spec.algorithm.rollout_correction.rejection):
        if rejection.statistic == "k1" and rejection.over == "sequenceMax":
            yield Violation(
                f"spec.algorithm.rolloutCorrection.rejection[{index}].over",
                "the largest k1 of a sequence does not detect small ratios",
                "use k2 or k3 with sequenceMax",
            )


@rule(
    cel=Cel(
        CORRECTION,
        "!has(self.rejection) || self.rejection.all(r, "
        "self.rejection.filter(s, s.statistic == r.statistic && s.over == r.over).size() == 1)",
        "a statistic is listed twice over the same; keep one of them",
        ".rejection",
    )
)
def rejections_differ(job: Job) -> Iterator[Violation]:
    seen: set[tuple[str, str]] = set()
    for index, rejection in enumerate(job.spec.algorithm.rollout_correction.rejection):
        key = (rejection.statistic, rejection.over)
        if key in seen:
            yield Violation(
                f"spec.algorithm.rolloutCorrection.rejection[{index}]",
                f"{rejection.statistic} over {rejection.over} is listed twice",
                "keep one of them",
            )
        seen.add(key)


@rule(
    cel=Cel(
        (*CORRECTION, "limits"),
        "has(self.kl) || has(self.effectiveSampleSize) || has(self.chiSquare)",
        "set one of kl, effectiveSampleSize and chiSquare",
    )
)
def limits_limit_something(job: Job) -> Iterator[Violation]:
    limits = job.spec.algorithm.rollout_correction.limits
    if limits and limits.kl is limits.effective_sample_size is limits.chi_square is None:
        yield Violation(
            "spec.algorithm.rolloutCorrection.limits",
            "sets none of kl, effectiveSampleSize and chiSquare",
            "set one of them, or remove it",
        )


@rule(
    cel=Cel(
        CORRECTION,
        "!has(self.proximal) || self.proximal != 'interpolated' || (has(self.mode) ? self.mode == 'decoupled' : "
        "has(self.preset) && !self.preset.startsWith('bypass'))",
        "needs mode: decoupled",
        ".proximal",
    )
)
def interpolation_belongs_to_decoupled(job: Job) -> Iterator[Violation]:
    correction = job.resolved.algorithm.rollout_correction
    if correction.proximal == "interpolated" and correction.mode != "decoupled":
        yield Violation(
            "spec.algorithm.rolloutCorrection.proximal",
            f"mode {correction.mode} has no third policy to interpolate",
            "set mode: decoupled, or remove it",
        )


@rule(
    cel=[
        Cel(
            CORRECTION,
            "!has(self.proximal) || self.proximal != 'interpolated' || !has(self.weights) || !self.weights.normalize",
            "the weights of a batch are not known before its update; use recomputed, or remove weights.normalize",
            ".proximal",
        ),
        Cel(
            ALGORITHM,
            "!has(self.rolloutCorrection.proximal) || self.rolloutCorrection.proximal != 'interpolated' || "
            f"!{cel.loss_in('self', ['clipCov', 'klCov'])}",
            "clipCov and klCov select their tokens before pi_old is known; use recomputed",
            ".rolloutCorrection.proximal",
        ),
    ]
)
def interpolation_is_made_in_the_loss(job: Job) -> Iterator[Violation]:
    algorithm = job.resolved.algorithm
    correction = algorithm.rollout_correction
    if correction.proximal != "interpolated":
        return
    path, remedy = "spec.algorithm.rolloutCorrection.proximal", "use recomputed"
    if correction.weights is not None and correction.weights.normalize:
        yield Violation(
            path,
            "weights.normalize needs the weights of the whole batch, which are not known before the update",
            remedy,
        )
    if algorithm.policy_loss.type in ("clipCov", "klCov"):
        yield Violation(path, f"{algorithm.policy_loss.type} selects its tokens before pi_old is known", remedy)


@rule(
    cel=[
        Cel(
            CORRECTION,
            "!has(self.limits) || self.limits.action != 'correct' || "
            "!(has(self.mode) ? self.mode == 'decoupled' : has(self.preset) && !self.preset.startsWith('bypass')) || "
            "!(has(self.weights) || has(self.preset) && self.preset in "
            f"{one_of(name for name, preset in CORRECTION_PRESETS.items() if preset.weights)})",
            "correct has nothing to switch on: mode decoupled already has weights; use warn or rollBack",
            ".limits.action",
        ),
        Cel(
            ALGORITHM,
            "!has(self.rolloutCorrection.limits) || self.rolloutCorrection.limits.action != 'correct' || "
            f"!{cel.loss_in('self', cel.BYPASSING)}",
            "the loss requires mode bypass, so correct cannot switch to decoupled; use warn or rollBack",
            ".rolloutCorrection.limits.action",
        ),
    ]
)
def correction_can_be_switched_on(job: Job) -> Iterator[Violation]:
    correction, loss = job.resolved.algorithm.rollout_correction, job.resolved.algorithm.policy_loss.type
    if correction.limits is None or correction.limits.action != "correct":
        return
    path, remedy = "spec.algorithm.rolloutCorrection.limits.action", "use warn or rollBack"
    if correction.mode == "decoupled" and correction.weights is not None:
        yield Violation(path, "correct has nothing to switch on: mode decoupled already has weights", remedy)
    if job.policy_loss.needs_bypass:
        yield Violation(path, f"the loss {loss} requires mode bypass, so correct cannot switch to decoupled", remedy)
