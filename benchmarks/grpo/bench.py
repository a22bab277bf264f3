"""GRPO against TRL's: the same model, prompts, algorithm and number of samples, two cores each.

Both start from the same 5 M-parameter model and train it 12 on-policy steps of 16 prompts x 8
samples, whose lengths are long-tailed and end by themselves. Seconds are those of training: neither
side's imports, start or end count. TRL generates with the Hugging Face library, its default; ours
with the transformers engine.
"""

from __future__ import annotations

from benchmarks.harness import Bar, Bench, Case, PeerSoftware, Results, ratio

OURS, THEIRS = "ours", "trl, 2 threads"
EVALUATED = "ours, evaluated"
OURS_LORA, THEIRS_LORA = "ours, LoRA", "trl, LoRA"
SPEED, REWARD = "samples_per_second", "reward"

TRL = PeerSoftware(
    name="trl",
    requirements=(
        ("torch==2.13.0",),
        (
            *("trl==1.16.0", "transformers==5.19.0", "accelerate==1.15.0", "datasets==5.2.0"),
            "peft==0.21.2",
        ),
    ),
)


def _lowest_reward(results: Results) -> float:
    return min(results.values(THEIRS, REWARD))


def _ours(name: str, *how: str) -> Case:
    command = ("{python}", "{here}/ours.py", "--seed", "{repetition}", "--out", "{out}", *how)
    return Case(name, command, requires=("transformers",), cores=2)


def _theirs(name: str, *how: str) -> Case:
    seeded = ("{python}", "{here}/trl_grpo.py", "--seed", "{repetition}", "--threads", "2")
    return Case(name, (*seeded, *how), peer=TRL, cores=2, threads=2)


BENCH = Bench(
    name="grpo",
    summary="GRPO on a 5 M-parameter language model against TRL's GRPOTrainer",
    cases=(
        _ours(OURS),
        _ours(EVALUATED, "--evaluated"),
        _ours(OURS_LORA, "--lora"),
        _theirs(THEIRS),
        _theirs(THEIRS_LORA, "--lora"),
    ),
    bars=(
        ratio("samples/s / TRL's", metric=SPEED, ours=OURS, theirs=THEIRS, at_least=1.3),
        ratio(
            "samples/s with evaluations / without",
            metric=SPEED,
            ours=EVALUATED,
            theirs=OURS,
            at_least=0.95,
        ),
        ratio(
            "LoRA: samples/s / TRL's",
            metric=SPEED,
            ours=OURS_LORA,
            theirs=THEIRS_LORA,
            at_least=2.0,
        ),
        Bar(
            name="median reward of the last 4 steps / lowest of theirs over the seeds",
            cases=(OURS, THEIRS),
            value=lambda results: results.median(OURS, REWARD),
            target=_lowest_reward,
        ),
    ),
    repetitions=3,
    notes=(
        "two cores each; seeds 0, 1, 2; on-policy, one optimizer step for 128 samples; float32",
        "evaluated: 16 greedy answers beside every 4th step, 3 % of what is generated",
        "LoRA: an adapter of rank 8 on all linear layers, on both sides",
        "reward: of the samples of the last 4 of 12 steps, by the same prompts on both sides",
    ),
)
