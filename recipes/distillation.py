"""On-policy distillation: a small language model learns from a larger one, on answers of its own.

    python recipes/distillation.py --dry-run                                          the plan
    python recipes/distillation.py actor.model=models/small teacher.model=models/large

Printed is `kl`, the reverse KL of the student to the teacher in nats per token, which falls. Both models are folders of
Hugging Face with one tokenizer; `rollout.generation.engine=vllm` generates by vLLM.

The student answers prompts, the teacher scores the tokens of the answers. A token that the teacher finds likelier than
the student did becomes likelier: the policy gradient of the reverse KL per token (Thinking Machines, "On-Policy
Distillation", 2025; Agarwal et al., arXiv:2306.13649).
"""

from __future__ import annotations

import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlplace import Channel, GenerationEngine, Job, Stage, Worker, full, run, weights

STEPS = 4  # optimizer steps of an iteration, each on other answers


class Rollout(Worker):
    """The student's engine, which answers prompts with the newest weights."""

    def setup(self) -> None:
        model = self.config["model"]
        self.engine = GenerationEngine(self, model, **self.config["generation"])
        self.weights_of(self.engine)
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def answer(self, iteration: int) -> None:
        draw = random.Random(1000 * iteration + self.rank)
        texts = [
            f"What is {draw.randrange(100)} + {draw.randrange(100)}?"
            for _ in range(self.config["prompts"])
        ]
        prompts = self.tokenizer(texts)["input_ids"]
        found = self.engine.generate(
            prompts, iteration=iteration, **self.config["answers"]
        )
        answers = [
            (prompt, answer.tokens.tolist(), torch.as_tensor(answer.logprobs))
            for prompt, samples in zip(prompts, found, strict=True)
            for answer in samples
        ]
        # Every teacher gets its part of the answers of every rollout rank.
        teachers = self.world_size_of("teacher")
        for rank in range(teachers):
            self.channel("answers").put(answers[rank::teachers], key=str(rank))


class Teacher(Worker):
    """The larger model, which stays as it is: scores the student's tokens."""

    def setup(self) -> None:
        self.engine = GenerationEngine(
            self, self.config["model"], frozen=True, **self.config["generation"]
        )

    def score(self, iteration: int) -> None:
        answers = []
        for _ in range(self.world_size_of("rollout")):
            answers += self.channel("answers").get(key=str(self.rank))
        whole = [[*prompt, *tokens] for prompt, tokens, _ in answers]
        scored = []
        for answer, scores in zip(answers, self.engine.logprobs_of(whole), strict=True):
            of_answer = torch.as_tensor(scores[len(answer[0]) - 1 :])
            scored.append((*answer, of_answer))
        learners = self.world_size_of("actor")
        for rank in range(learners):
            self.channel("scored").put(scored[rank::learners], key=str(rank))


class Student(Worker):
    """Learns by the reverse KL per token; the ranks average their gradients."""

    needs_own_process = True

    def setup(self) -> None:
        self.device = self.context.device.torch_name
        self.model = AutoModelForCausalLM.from_pretrained(
            self.config["model"], dtype=torch.float32
        ).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.config["lr"])
        self.offload(self.model, self.optimizer)
        self.weights_of(self.model)
        self.process_group()

    def learn(self, iteration: int) -> dict[str, float]:
        samples = []
        for _ in range(self.world_size_of("teacher")):
            samples += self.channel("scored").get(key=str(self.rank))
        for step in range(STEPS):
            self.optimizer.zero_grad()
            self.loss(samples[step::STEPS]).backward()
            for parameter in self.model.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= self.world_size
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        # The student drew these tokens, so that the mean estimates its reverse KL.
        differences = torch.cat([drawn - scores for _, _, drawn, scores in samples])
        return {"kl": float(differences.mean())}

    def loss(self, samples: list) -> torch.Tensor:
        rows = [torch.tensor([*prompt, *tokens]) for prompt, tokens, _, _ in samples]
        batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.device)
        logprobs = self.model(input_ids=batch[:, :-1]).logits.log_softmax(-1)
        chosen = logprobs.gather(-1, batch[:, 1:, None]).squeeze(-1)
        losses = []
        for row, (prompt, tokens, drawn, scores) in zip(chosen, samples, strict=True):
            first = len(prompt) - 1
            advantages = (scores - drawn).to(self.device)
            # The ratio counts the optimizer steps since the tokens were drawn.
            ratio = (row[first : first + len(tokens)] - drawn.to(self.device)).exp()
            losses.append(-ratio * advantages)
        return torch.cat(losses).mean()

    def save_state(self) -> object:
        if self.rank != 0:
            return None  # all ranks have the same
        return {"model": self.model.state_dict(), "adam": self.optimizer.state_dict()}

    def load_state(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["adam"])


job = Job(
    name="distillation",
    components={"actor": Student, "rollout": Rollout, "teacher": Teacher},
    stages=[
        Stage("sync", weights("actor", to="rollout")),
        Stage("rollout", full("rollout").calls("answer")),
        Stage("score", full("teacher").calls("score")),
        Stage("learn", full("actor").calls("learn")),
    ],
    channels=[
        Channel("answers", "rollout", "teacher", by_rank=True),
        Channel("scored", "teacher", "actor", by_rank=True),
    ],
    score="actor/kl",
)

if __name__ == "__main__":
    run(job, "distillation.yaml")
