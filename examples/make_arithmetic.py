"""Makes `examples/arithmetic/`: a tiny addition model, wrong about half of the time, and its data.

    python examples/make_arithmetic.py

The model is a two-layer Qwen3 of 105,152 parameters, pretrained on the homework of sloppy pupils,
who add column by column, units first, and then read the answer off:

    847+356=?   13 10 12: 1203      a correct one
    847+356=?   13 9 11: 1193       one that forgot a carry

Pupils forget a carry more often than not over a hard column, so the model learns both the procedure
and the slip, and greedily prefers the slip. What is left to reinforcement learning is to carry in
every column, over every pair of digits. The pairs of numbers in pretraining, train.jsonl and
test.jsonl are disjoint. Everything follows from SEED: two runs on one machine write the same bytes.
It takes two minutes on two cores with OpenBLAS, several times that with the reference BLAS.
"""

import json
import random
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer, decoders, models

SEED = 0
STEPS, ROWS, LEARNING_RATE = 1500, 64, 5e-3
TRAIN_PAIRS, TEST_PAIRS = 1536, 256
FORGET_EASY, FORGET_HARD, HARD = 0.4, 0.7, 6

FOLDER = Path(__file__).parent / "arithmetic"
PAD, END, ROLES = "<|pad|>", "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>")
CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPT, COMPLETION = 12, 15  # tokens of every prompt, and of the longest completion with its end


# The task.


def draw_pairs(rng, count, reserved):
    """Draws `count` pairs of three-digit numbers that `reserved` does not hold in either order."""
    pairs = []
    while len(pairs) < count:
        pair = rng.randint(100, 999), rng.randint(100, 999)
        if frozenset(pair) not in reserved:
            pairs.append(pair)
    return pairs


def draw_distinct_pairs(rng, count, reserved):
    """Draws `count` different pairs and adds each to `reserved`."""
    pairs = []
    for _ in range(count):
        pairs += draw_pairs(rng, 1, reserved)
        reserved.add(frozenset(pairs[-1]))
    return pairs


def question(a, b):
    """The user's turn."""
    return f"{a}+{b}=?"


def homework(rng, a, b):
    """A sloppy pupil's solution: the sum of each column, units first, then the answer they give."""
    sums, carry = [], 0
    for place in (1, 10, 100):
        column = a // place % 10 + b // place % 10
        forgotten = rng.random() < (FORGET_HARD if column >= HARD else FORGET_EASY)
        sums.append(column if forgotten else column + carry)
        carry = sums[-1] // 10
    units, tens, hundreds = sums
    return f"{units} {tens} {hundreds}: {hundreds}{tens % 10}{units % 10}"


# The tokenizer and the batches.


def make_tokenizer():
    """One token for each printable ASCII character and each marker of the chat template."""
    markers = [PAD, END, *ROLES]
    vocabulary = {token: i for i, token in enumerate([*markers, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(markers)
    return tokenizer


def encode_prompt(tokenizer, a, b):
    """The ids that CHAT_TEMPLATE gives for the question, up to the assistant's turn."""
    return tokenizer.encode(f"<|user|>{question(a, b)}<|end|><|assistant|>").ids


def draw_batch(tokenizer, rng, reserved):
    """Draws chats, tokens [B, T] right-padded, and the mask [B, T] of what the pupil wrote."""
    rows = []
    for a, b in draw_pairs(rng, ROWS, reserved):
        ids = encode_prompt(tokenizer, a, b) + tokenizer.encode(homework(rng, a, b) + END).ids
        rows.append(ids + [tokenizer.token_to_id(PAD)] * (PROMPT + COMPLETION - len(ids)))
    tokens = mx.array(rows)
    written = (mx.arange(tokens.shape[1]) >= PROMPT) & (tokens != tokenizer.token_to_id(PAD))
    return tokens, written


# The model.


def make_config(tokenizer):
    """The config.json of the model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }


def make_model(config):
    """A model with the random weights of SEED."""
    mx.random.seed(SEED)  # mlx layers draw their weights from the global state
    return qwen3.Model(qwen3.ModelArgs.from_dict(config))


def loss(model, tokens, mask):
    """Mean cross-entropy in nats over the tokens under the mask; tokens and mask are [B, T]."""
    losses = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    return mx.sum(losses * mask[:, 1:]) / mx.sum(mask)


def make_optimizer(steps, warmup=50):
    """AdamW under a linear warmup and a cosine decay to a twentieth of the learning rate."""
    rise = optim.linear_schedule(0, LEARNING_RATE, warmup)
    fall = optim.cosine_decay(LEARNING_RATE, steps - warmup, LEARNING_RATE / 20)
    return optim.AdamW(optim.join_schedules([rise, fall], [warmup]), betas=[0.9, 0.98])


def pretrain(model, draw, steps):
    """Trains in place on so many batches of `draw()`, tokens and masks."""
    optimizer = make_optimizer(steps)
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(tokens, mask):
        value, gradient = nn.value_and_grad(model, loss)(model, tokens, mask)
        optimizer.update(model, gradient)
        return value

    for i in range(1, steps + 1):
        value = step(*draw())
        mx.eval(state, value)  # keeps the graph to one step
        if i % 100 == 0:
            print(f"step {i}  loss {value.item():.4f}", flush=True)


def complete(model, tokens, key=None):
    """Extends prompts [B, P] to [B, P + COMPLETION], greedily or, with a key, by sampling."""
    for i in range(COMPLETION):
        logits = model(tokens)[:, -1]
        if key is None:
            chosen = mx.argmax(logits, axis=-1)
        else:
            chosen = mx.random.categorical(logits, key=mx.random.split(key, COMPLETION)[i])
        tokens = mx.concatenate([tokens, chosen[:, None]], axis=1)
        mx.eval(tokens)  # keeps the graph to one token
    return tokens


def accuracy(model, tokenizer, pairs, key=None):
    """The share of pairs whose completion ends in their sum."""
    prompts = mx.array([encode_prompt(tokenizer, a, b) for a, b in pairs])
    chats = complete(model, prompts, key)[:, PROMPT:].tolist()
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in chats]
    endings = [f": {a + b}{END}" for a, b in pairs]
    return sum(end in text for text, end in zip(texts, endings, strict=True)) / len(pairs)


# The folder.


def write_json(path, value):
    """Writes one indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_pairs(name, pairs):
    """Writes one row a pair: its question and its answer."""
    rows = [json.dumps({"question": question(a, b), "answer": str(a + b)}) for a, b in pairs]
    (FOLDER / name).write_text("\n".join(rows) + "\n")


def write_model(model, config, folder):
    """Writes config.json and model.safetensors."""
    write_json(folder / "config.json", config)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def write_tokenizer(tokenizer, folder):
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)


def main():
    """Draws the pairs, trains the model and writes the folder."""
    rng, reserved = random.Random(SEED), set()
    test = draw_distinct_pairs(rng, TEST_PAIRS, reserved)
    train = draw_distinct_pairs(rng, TRAIN_PAIRS, reserved)
    tokenizer = make_tokenizer()
    config = make_config(tokenizer)
    model = make_model(config)
    pretrain(model, lambda: draw_batch(tokenizer, rng, reserved), STEPS)

    FOLDER.mkdir(exist_ok=True)
    write_pairs("train.jsonl", train)
    write_pairs("test.jsonl", test)
    write_tokenizer(tokenizer, FOLDER)
    write_model(model, config, FOLDER)
    greedy = accuracy(model, tokenizer, test)
    sampled = accuracy(model, tokenizer, test, mx.random.key(SEED))
    print(f"accuracy on test.jsonl: greedy {greedy:.3f}, sampled at temperature 1 {sampled:.3f}")


if __name__ == "__main__":
    main()
