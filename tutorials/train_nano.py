"""How nano, the model that ships with nanograph, was made: `python tutorials/train_nano.py --text FILE`.

FILE is plain text: plays, separated by two blank lines. The script learns a byte-pair vocabulary, trains the model of
nanograph/model.py on 95 % of the plays, keeps the weights that predict the held-out 5 % best, and writes a checkpoint
in gpt-oss's format. The log (losses, GPU, time) goes to tutorials/results/train_nano.json.

The model is the one that serves, but for two operations: training has no KV cache, so `dense_rotary` and
`dense_attention` stand in for the ones that read and write it. The corpus is small (about 1.5 million tokens), so
overfitting is the enemy: hence dropout, weight decay, and keeping the best weights rather than the last.

What it leaves out: a third set of plays. The held-out ones also choose the weights that are kept, and chose the default
settings, so their loss is likely lower than that of plays never looked at.

Read first: nanograph/model.py. Then from `main` upwards.
"""

import base64
import datetime
import json
import math
import random
import subprocess
import time
from pathlib import Path
from types import MethodType, SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from nanograph import LLM, SamplingParams
from nanograph.checkpoint import ASSETS, gpt_oss_config, gpt_oss_places
from nanograph.generate import CommandLine, exit_code
from nanograph.kernels import reference
from nanograph.model import GPT
from nanograph.tokenizer import SPLIT, own_encoding

CONTEXT, VOCABULARY, RESULTS = 1024, 8192, Path(__file__).with_name("results")
SETTINGS = ("steps", "batch", "length", "lr", "dropout", "weight_decay")  # the options that the log repeats
CONFIG = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "eos_token_id": VOCABULARY - 1,
}


def split_plays(text):
    """Plays for training and held-out plays of about 5 % of the text, chosen by a fixed seed.

    Raises ValueError for fewer than two plays.
    """
    plays = [play.strip("\n") + "\n" for play in text.split("\n\n\n") if play.strip()]
    if len(plays) < 2:
        raise ValueError("the text must hold at least two plays, separated by two blank lines")
    random.Random(0).shuffle(plays)
    held_out = [plays.pop()]
    while sum(map(len, held_out)) < 0.045 * len(text) and len(plays) > 1:
        held_out.append(plays.pop())
    return plays, held_out


def train_vocabulary(plays, path):
    """Learn VOCABULARY - 1 byte-pair ranks and write them as tiktoken's `base64 rank` lines: 256 bytes, then merges.

    The same plays give the same file. Raises ValueError for a text with too few different words to learn so many.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(plays, trainer)
    # GPT-2's alphabet, in which `tokenizers` spells bytes: printable ones are themselves, the rest are moved past 255.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in printable]
    to_byte = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(shifted)}
    merged = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]) if len(token) > 1]
    tokens = [bytes([byte]) for byte in range(256)] + [bytes(to_byte[letter] for letter in token) for token in merged]
    if len(tokens) != VOCABULARY - 1:
        raise ValueError(f"the text is too small: it gave {len(tokens)} of the vocabulary's {VOCABULARY - 1} ranks")
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))


def encode(plays, encoding):
    """All plays in one row of token ids, <|endoftext|> after each."""
    ids = [token for play in plays for token in [*encoding.encode_ordinary(play), VOCABULARY - 1]]
    return torch.tensor(ids, dtype=torch.int32)


def dense_rotary(self, qkv, batch):
    """Rotary.forward without a cache: keys and values wait in the batch until the layer's attention takes them."""
    cos, sin = self.table[:, batch.positions].unsqueeze(2)
    q, k, v = qkv.unflatten(1, (-1, CONFIG["head_dim"])).split(
        [CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["num_key_value_heads"]], dim=1
    )
    batch.keys_values = reference.rotate(k, cos, sin), v
    return reference.rotate(q, cos, sin)


def dense_attention(self, q, batch):
    """Attention.forward over whole sequences of equal length, differentiable, sinks and window included.

    A sink is a key with no content and no value but one feature of its own, in which every query carries its head's
    sink logit. Features and keys are added by eights, which keeps fast attention kernels usable.
    """
    length, groups = batch.length, CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, *batch.keys_values))  # [rows, heads, S, D]
    k, v = (F.pad(x, (0, 8, 8, 0)).repeat_interleave(groups, dim=1) for x in (k, v))
    sink_key = F.one_hot(torch.tensor(CONFIG["head_dim"]), k.shape[-1]).to(k)
    k = torch.cat([sink_key.expand(*k.shape[:2], 1, -1), k[:, :, 1:]], dim=2)
    sinks = (self.sinks / self.scale).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, sinks.to(q.dtype)], dim=-1), (0, 7))
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    seen = F.pad((distance >= 0) & (distance < (self.window or length)), (8, 0))
    seen[:, 0] = True
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
    return out[..., :-8].transpose(1, 2).flatten(0, 1).flatten(1)


def without_cache(model):
    """Let this model, and no other, compute rotary positions and attention densely."""
    for block in model.blocks:
        block.rotary.forward = MethodType(dense_rotary, block.rotary)
        block.attention.forward = MethodType(dense_attention, block.attention)
    return model


def forward(model, ids):
    """Logits of every position: ids [sequences, S] -> [sequences, S, vocabulary]."""
    rows, length = ids.shape
    positions = torch.arange(length, device=ids.device).repeat(rows)
    num_tokens = torch.full((1,), rows * length, device=ids.device)
    batch = SimpleNamespace(input_ids=ids.flatten(), positions=positions, cu_seqlens_q=num_tokens, length=length)
    return model.head(model.norm(model.hidden_states(batch))).view(rows, length, -1)


def add_dropout(model, rate):
    """Drop parts of what enters the residual stream, while training."""
    for name, module in model.named_modules():
        if name.endswith(("embedding", "attention_output", "mlp")):
            module.register_forward_hook(lambda module, _, out: F.dropout(out, rate, module.training))


def balance_loss(router_logits):
    """Switch Transformer's load-balancing loss (Fedus et al. 2021): 1 where experts are used evenly, more where not."""
    experts, top = CONFIG["num_local_experts"], CONFIG["num_experts_per_tok"]
    chosen = F.one_hot(router_logits.topk(top, dim=-1).indices, experts).float().sum(1).mean(0) / top
    return experts * (chosen * router_logits.float().softmax(-1).mean(0)).sum()


@torch.no_grad()
def held_out_nats(model, ids):
    """Total nats of a row of ids. Each but the first is predicted once, from half a context or more of those before."""
    model.eval()
    total, step = 0.0, CONTEXT // 2
    for start in range(0, len(ids) - 1, step):
        begin = max(0, start + step - CONTEXT)
        window = ids[begin : start + step + 1][None]
        losses = F.cross_entropy(forward(model, window[:, :-1])[0].float(), window[0, 1:].long(), reduction="none")
        total += losses[start - begin :].sum().item()
    model.train()
    return total


def make_optimizer(masters, args):
    """AdamW on float32 master copies of the parameters; vectors (norms, biases, sinks) do not decay."""
    groups = [
        {"params": [master for master in masters if master.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [master for master in masters if master.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))


def learning_rate(step, args):
    """A linear warm-up over 5 % of the steps, then a cosine down to zero."""
    return args.lr * min((step + 1) / (0.05 * args.steps), 0.5 + 0.5 * math.cos(math.pi * step / args.steps))


def train(model, ids, held_out, args):
    """Train in the model's dtype with float32 masters. Returns the log; leaves the best weights in the model.

    Ctrl-C ends the training early.
    """
    parameters, router_logits, log, best = list(model.parameters()), [], [], math.inf
    masters = [parameter.detach().float().clone() for parameter in parameters]
    best_weights = [parameter.detach().clone() for parameter in parameters]
    optimizer, starts = make_optimizer(masters, args), torch.Generator().manual_seed(0)
    add_dropout(model, args.dropout)
    for block in model.blocks:
        block.mlp.router.register_forward_hook(lambda module, _, out: router_logits.append(out))
    windows = ids.unfold(0, args.length + 1, 1)  # a view: every place where a sequence may start
    try:
        for step in range(1, args.steps + 1):
            window = windows[torch.randint(len(windows), (args.batch,), generator=starts)]
            router_logits.clear()
            logits = forward(model, window[:, :-1]).flatten(0, 1).float()
            loss = F.cross_entropy(logits, window[:, 1:].flatten().long())
            (loss + 0.01 * sum(map(balance_loss, router_logits)) / len(router_logits)).backward()
            for parameter, master in zip(parameters, masters):
                master.grad, parameter.grad = parameter.grad.float(), None
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
            if step % args.evaluate_every == 0 or step == args.steps:
                nats = held_out_nats(model, held_out) / (len(held_out) - 1)
                log.append({"step": step, "loss": loss.item(), "held_out_loss": nats})
                print(log[-1], flush=True)
                if nats < best:
                    best, best_weights = nats, [parameter.detach().clone() for parameter in parameters]
    except KeyboardInterrupt:
        if not log:
            raise
        print("interrupted: keeping the best weights so far")
    with torch.no_grad():
        torch._foreach_copy_(parameters, best_weights)
    return log


def initialize(model):
    """Normal weights of standard deviation 0.02; those that write to the residual stream shrink with depth (GPT-2)."""
    for name, parameter in model.named_parameters():
        depth = math.sqrt(2 * len(model.blocks)) if name.endswith(("attention_output.weight", "mlp.down")) else 1.0
        if parameter.ndim > 1 and not name.endswith("_bias"):
            torch.nn.init.normal_(parameter, std=0.02 / depth)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)


def save(model, folder):
    """Write config.json and model.safetensors under gpt-oss's names: q, k, v apart, experts as [expert, in, out]."""
    places = gpt_oss_places(model)
    del places["lm_head.weight"]  # it is the embedding
    tensors = {name: view.detach().bfloat16().cpu().contiguous() for name, view in places.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def machine(device):
    """What the log says of the machine."""
    if device.type != "cuda":
        return {"device": "cpu"}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
    return {"device": torch.cuda.get_device_name(device), "driver": driver}


def summarize(log, model, args, plays, held_out, tokens):
    """What tutorials/results/train_nano.json says. tokens: how many train, how many are held out."""
    best = min(row["held_out_loss"] for row in log)
    held_out_bytes = sum(len(play.encode()) for play in held_out)
    options = " ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in SETTINGS)
    return {
        "command": f"python tutorials/train_nano.py --text FILE {options}",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        **machine(model.head.weight.device),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": VOCABULARY,
        "train_plays": len(plays),
        "train_tokens": tokens[0],
        "held_out_plays": [play.splitlines()[0] for play in held_out],
        "held_out_loss": best,
        "held_out_bits_per_byte": best * (tokens[1] - 1) / math.log(2) / held_out_bytes,
        "log": log,
    }


def run(args):
    """Train, write the checkpoint and the log, print a sample. Raises ValueError for a text that cannot be used."""
    torch.manual_seed(0)
    device, began = torch.device(args.device), time.time()
    try:
        plays, held_out = split_plays(args.text.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the text {args.text}: {error.strerror}") from None
    args.out.mkdir(parents=True, exist_ok=True)
    train_vocabulary(plays, args.out / "vocab.tiktoken")
    encoding = own_encoding(args.out / "vocab.tiktoken", VOCABULARY)
    ids, held_out_ids = (encode(part, encoding).to(device) for part in (plays, held_out))
    if len(ids) <= args.length:
        raise ValueError(f"the text gives {len(ids)} tokens to train on: too few for --length {args.length}")

    with device:
        model = without_cache(GPT(gpt_oss_config(CONFIG), reference, CONTEXT, device))
        initialize(model)
    model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    log = train(model, ids, held_out_ids, args)
    save(model, args.out)

    summary = summarize(log, model, args, plays, held_out, (len(ids), len(held_out_ids)))
    summary["seconds"] = round(time.time() - began)
    args.log.parent.mkdir(parents=True, exist_ok=True)
    args.log.write_text(json.dumps(summary, indent=1) + "\n")
    print({key: value for key, value in summary.items() if key != "log"})
    params = SamplingParams(temperature=0.8, max_new_tokens=200, seed=0)
    [sample] = LLM(args.out, device=args.device).generate(["ROMEO:\n"], params)
    print("ROMEO:\n" + sample.text)


def parse_arguments(argv):
    parser = CommandLine("python tutorials/train_nano.py", description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="plays, separated by two blank lines")
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder")
    parser.add_argument("--log", type=Path, default=RESULTS / "train_nano.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--evaluate-every", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--length", type=int, default=CONTEXT, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=1.2e-3)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--weight-decay", type=float, default=1.0)
    return parser.parse_args(argv)


def main(argv=None):
    return exit_code("python tutorials/train_nano.py", run, parse_arguments(argv))


if __name__ == "__main__":
    raise SystemExit(main())
