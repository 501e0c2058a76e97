#!/usr/bin/env python3
"""Makes the tiny random checkpoints of this folder, with golden logits. Needs numpy alone.

    make_zoo.py [NAME...]      write these checkpoints beside this script; without a name all of them
    make_zoo.py --check DIR    run the forward pass below on a Hugging Face directory that has a goldens.json made by
                               transformers, and print the largest difference of its logits (this is how the forward pass
                               itself was checked: about 1e-5 on every family, the rounding of the recorded values)

One checkpoint of each FFN family, as small as the block formats allow, with what differs between files in the wild spread over
them: f16/bf16/f32, one file or shards, tokenizer.json, tokenizer.model, or vocab.json and merges.txt, both spellings of RoPE
settings. The forward pass is transformers' arithmetic (modeling_llama.py and its kin) in float64.

goldens.json: `ids` of a prompt, `logits` at every position (first prompt only), `last_logits`, and `greedy_ids` with the
smallest difference between the best and the second-best logit on the way: a continuation may flip where that is near zero.
"""
import json
import math
import pathlib
import re
import struct
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent

# ------------------------------------------------------------------------------------------------ forward pass


def act(name, z, threshold):
    if name in ("relu", "drelu"):
        return np.maximum(z, 0)
    if name == "fatrelu":
        return np.where(z > threshold, z, 0)
    if name == "relu2":
        return np.maximum(z, 0) ** 2
    if name == "silu":
        return z / (1 + np.exp(-z))
    if name == "gelu_pytorch_tanh":
        return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    raise ValueError(name)


def rms_norm(x, w, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def layer_norm(x, w, b, eps):
    d = x - x.mean(-1, keepdims=True)
    return d / np.sqrt((d * d).mean(-1, keepdims=True) + eps) * w + b


def inv_freq(c, head_dim):
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    theta = rope.get("rope_theta", c.get("rope_theta", 10000.0))
    f = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "linear":
        return f / rope["factor"]
    if kind == "llama3":
        old, lo, hi = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        wavelen = 2 * math.pi / f
        smooth = (old / wavelen - lo) / (hi - lo)
        blend = (1 - smooth) * f / rope["factor"] + smooth * f
        return np.where(wavelen > old / lo, f / rope["factor"], np.where(wavelen < old / hi, f, blend))
    assert kind == "default", kind
    return f


def rotate(x, f):  # x [T, heads, head_dim]
    angle = np.arange(x.shape[0])[:, None] * f[None]
    cos, sin = (np.concatenate([g(angle)] * 2, -1)[:, None] for g in (np.cos, np.sin))
    a, b = np.split(x, 2, -1)
    return x * cos + np.concatenate([-b, a], -1) * sin


F16_CACHE = False  # round keys and values to f16 on the way, as inference engines' caches do


def attention(q, k, v, window=None):  # [T, heads, head_dim], [T, kv heads, head_dim]
    T, n_head, d = q.shape
    if F16_CACHE:
        k, v = (t.astype(np.float16).astype(np.float64) for t in (k, v))
    k, v = (np.repeat(t, n_head // t.shape[1], 1) for t in (k, v))
    s = np.einsum("thd,uhd->htu", q, k) / math.sqrt(d)
    back = np.arange(T)[:, None] - np.arange(T)  # positions from the key to the query
    s = np.where((back >= 0) & (back < (window or T)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("htu,uhd->thd", p / p.sum(-1, keepdims=True), v).reshape(T, -1)


def forward_llama(c, w, ids, ffn):
    n_head, n_kv = c["num_attention_heads"], c.get("num_key_value_heads", c["num_attention_heads"])
    head_dim = c.get("head_dim") or c["hidden_size"] // n_head
    eps, T, f = c["rms_norm_eps"], len(ids), inv_freq(c, head_dim)
    x = w["model.embed_tokens.weight"][ids]
    for l in range(c["num_hidden_layers"]):
        p = f"model.layers.{l}."

        def linear(name, h):
            return h @ w[p + name + ".weight"].T + w.get(p + name + ".bias", 0)

        h = rms_norm(x, w[p + "input_layernorm.weight"], eps)
        q, k, v = (linear(f"self_attn.{n}_proj", h).reshape(T, -1, head_dim) for n in "qkv")
        if p + "self_attn.q_norm.weight" in w:
            q, k = (rms_norm(t, w[p + f"self_attn.{n}_norm.weight"], eps) for t, n in ((q, "q"), (k, "k")))
        assert q.shape[1] == n_head and k.shape[1] == n_kv
        x = x + linear("self_attn.o_proj", attention(rotate(q, f), rotate(k, f), v))
        h = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
        up = linear("mlp.up_proj", h)
        if p + "mlp.gate_proj.weight" in w:
            gate = act(ffn, linear("mlp.gate_proj", h), c.get("hidden_act_param"))
            x = x + linear("mlp.down_proj", gate * (np.maximum(up, 0) if ffn == "drelu" else up))
        else:
            x = x + linear("mlp.down_proj", act(ffn, up, None))
    x = rms_norm(x, w["model.norm.weight"], eps)
    return x @ w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"].T


def forward_opt(c, w, ids, ffn):
    n_head, T, p0 = c["num_attention_heads"], len(ids), "model.decoder."
    x = w[p0 + "embed_tokens.weight"][ids] + w[p0 + "embed_positions.weight"][np.arange(T) + 2]
    for l in range(c["num_hidden_layers"]):
        p = f"{p0}layers.{l}."

        def linear(name, h):
            return h @ w[p + name + ".weight"].T + w[p + name + ".bias"]

        def norm(name, h):
            return layer_norm(h, w[p + name + ".weight"], w[p + name + ".bias"], 1e-5)

        h = norm("self_attn_layer_norm", x)
        q, k, v = (linear(f"self_attn.{n}_proj", h).reshape(T, n_head, -1) for n in "qkv")
        x = x + linear("self_attn.out_proj", attention(q, k, v))
        x = x + linear("fc2", act(ffn, linear("fc1", norm("final_layer_norm", x)), None))
    x = layer_norm(x, w[p0 + "final_layer_norm.weight"], w[p0 + "final_layer_norm.bias"], 1e-5)
    return x @ w[p0 + "embed_tokens.weight"].T


def forward_falcon(c, w, ids, ffn):
    n_head, n_kv, eps, T = c["num_attention_heads"], c["num_kv_heads"], c["layer_norm_epsilon"], len(ids)
    head_dim = c["hidden_size"] // n_head
    f, x = inv_freq(c, head_dim), w["transformer.word_embeddings.weight"][ids]
    for l in range(c["num_hidden_layers"]):
        p = f"transformer.h.{l}."

        def norm(name):
            return layer_norm(x, w[p + name + ".weight"], w[p + name + ".bias"], eps)

        qkv = (norm("ln_attn") @ w[p + "self_attention.query_key_value.weight"].T).reshape(T, n_kv, -1, head_dim)
        q, k, v = qkv[:, :, :-2].reshape(T, n_head, head_dim), qkv[:, :, -2], qkv[:, :, -1]
        a = attention(rotate(q, f), rotate(k, f), v) @ w[p + "self_attention.dense.weight"].T
        m = act(ffn, norm("ln_mlp") @ w[p + "mlp.dense_h_to_4h.weight"].T, None) @ w[p + "mlp.dense_4h_to_h.weight"].T
        x = x + a + m
    x = layer_norm(x, w["transformer.ln_f.weight"], w["transformer.ln_f.bias"], eps)
    return x @ w["transformer.word_embeddings.weight"].T


def forward_starcoder2(c, w, ids, ffn):
    T, head_dim, eps = len(ids), c["hidden_size"] // c["num_attention_heads"], c["norm_epsilon"]
    f, x = inv_freq(c, head_dim), w["model.embed_tokens.weight"][ids]
    for l in range(c["num_hidden_layers"]):
        p = f"model.layers.{l}."

        def linear(name, h):
            return h @ w[p + name + ".weight"].T + w.get(p + name + ".bias", 0)

        def norm(name, h):
            return layer_norm(h, w[p + name + ".weight"], w[p + name + ".bias"], eps)

        h = norm("input_layernorm", x)
        q, k, v = (linear(f"self_attn.{n}_proj", h).reshape(T, -1, head_dim) for n in "qkv")
        x = x + linear("self_attn.o_proj", attention(rotate(q, f), rotate(k, f), v, c["sliding_window"]))
        x = x + linear("mlp.c_proj", act(ffn, linear("mlp.c_fc", norm("post_attention_layernorm", x)), None))
    x = layer_norm(x, w["model.norm.weight"], w["model.norm.bias"], eps)
    return x @ w["model.embed_tokens.weight"].T


def forward(c, w, ids, drelu=False):
    arch = c["architectures"][0]
    ffn = c.get("hidden_act") or c.get("activation_function") or c.get("activation")
    if drelu or arch == "BambooForCausalLM":
        ffn = "drelu"
    run = {"OPTForCausalLM": forward_opt, "FalconForCausalLM": forward_falcon, "Starcoder2ForCausalLM": forward_starcoder2}
    return run.get(arch, forward_llama)(c, w, np.asarray(ids), ffn)


# ------------------------------------------------------------------------------------------------ files

DTYPES = {"F16": np.float16, "F32": np.float32}


def to_bf16(x):  # round to nearest even
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(b):
    return (b.astype(np.uint32) << 16).view(np.float32)


def rounded(x, dtype):
    return from_bf16(to_bf16(x)) if dtype == "BF16" else x.astype(DTYPES[dtype])


def write_safetensors(path, tensors, dtype):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name in sorted(tensors):
        raw = (to_bf16(tensors[name]) if dtype == "BF16" else tensors[name].astype(DTYPES[dtype])).tobytes()
        header[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(directory):
    tensors = {}
    for path in directory.glob("*.safetensors"):
        raw = path.read_bytes()
        n = struct.unpack("<Q", raw[:8])[0]
        for name, t in json.loads(raw[8 : 8 + n]).items():
            if name != "__metadata__":
                a, b = t["data_offsets"]
                data = np.frombuffer(raw[8 + n + a : 8 + n + b], DTYPES.get(t["dtype"], np.uint16))
                data = from_bf16(data) if t["dtype"] == "BF16" else data
                tensors[name] = data.reshape(t["shape"]).astype(np.float64)
    return tensors


# ------------------------------------------------------------------------------------------------ tokenizers

TEXT = """Once upon a time there was a small bear who lived by the river. Every morning the bear went down to the water and
looked for the fish. One day the fish said to the bear: please let me go, and I will tell you where the honey is. The bear
thought for a long time. Then he let the fish go, and the fish told him where to find the honey under the old tree."""
PROMPTS = ["the bear said", "Once upon a time there was", "The fish went to the river and said"]


def learn_merges(words, n):  # words: list of lists of symbols
    words, merges = [list(w) for w in words], []
    while len(merges) < n:
        counts = {}
        for w in words:
            for pair in zip(w, w[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(sorted(counts), key=lambda p: counts[p])
        merges.append(best)
        words = [merge_pair(w, best) for w in words]
    return merges


def merge_pair(word, pair):
    out = []
    for s in word:
        if out and (out[-1], s) == pair and out[-1] is not None:
            out[-1] = out[-1] + s
            out.append(None)  # a merged symbol does not merge again in this round
        else:
            if out and out[-1] is None:
                out.pop()
            out.append(s)
    return [s for s in out if s is not None]


def apply_merges(word, merges):
    rank = {p: i for i, p in enumerate(merges)}
    word = list(word)
    while True:
        best = min(zip(word, word[1:]), key=lambda p: rank.get(p, len(rank)), default=None)
        if best not in rank:
            return word
        word = merge_pair(word, best)


def byte_alphabet():  # GPT-2's printable stand-ins for the 256 bytes
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


class ByteBpe:
    eos = "<|endoftext|>"

    def __init__(self, n_merges=31):
        self.alphabet = byte_alphabet()
        self.merges = learn_merges([self.symbols(w) for w in self.words(TEXT)], n_merges)
        tokens = [self.eos] + sorted(self.alphabet) + [a + b for a, b in self.merges]
        self.vocab = {t: i for i, t in enumerate(tokens)}

    def words(self, text):  # ASCII prompts without contractions: every pre-tokenizer here cuts them alike
        return re.findall(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+", text)

    def symbols(self, word):
        return [self.alphabet[b] for b in word.encode()]

    def encode(self, text):
        return [self.vocab[s] for w in self.words(text) for s in apply_merges(self.symbols(w), self.merges)]

    def pretokenizer(self, kind):
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": kind == "gpt-2"}
        if kind == "gpt-2":
            return byte_level
        if kind == "falcon":
            return {"type": "Sequence", "pretokenizers": [
                {"type": "Punctuation", "behavior": "Contiguous"}, dict(byte_level, use_regex=True),
                {"type": "Digits", "individual_digits": False},
                {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False}]}
        if kind == "starcoder":
            return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, dict(byte_level, use_regex=True)]}
        digits = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}[kind]
        regex = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits +
                 r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
        return {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}, byte_level]}

    def write(self, directory, kind, pairs):
        merges = [[a, b] for a, b in self.merges] if pairs else [f"{a} {b}" for a, b in self.merges]
        added = {"id": 0, "content": self.eos, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        dump(directory / "tokenizer.json", {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [added],
            "normalizer": {"type": "NFC"} if kind == "qwen2" else None, "pre_tokenizer": self.pretokenizer(kind),
            "post_processor": None, "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": kind == "llama-bpe", "vocab": self.vocab, "merges": merges}})
        dump(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": self.eos,
                                                   "eos_token": self.eos, "unk_token": self.eos, "add_bos_token": False})

    def write_gpt2_files(self, directory):
        dump(directory / "vocab.json", self.vocab)
        lines = ["#version: 0.2"] + [f"{a} {b}" for a, b in self.merges]
        (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        dump(directory / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": False})
        dump(directory / "special_tokens_map.json", {"bos_token": self.eos, "eos_token": {"content": self.eos, "special": True}})


class SentencePiece:
    SPACE = "\u2581"

    def __init__(self, n_merges=30):
        words = [self.SPACE + w for w in re.findall(r"\S+", TEXT)]
        chars = sorted({s for w in words for s in w})
        self.merges = learn_merges([list(w) for w in words], n_merges)
        self.pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
        self.pieces += [(f"<0x{b:02X}>", 0.0, 6) for b in range(256)]
        self.pieces += [(a + b, -float(i), 1) for i, (a, b) in enumerate(self.merges)]
        self.pieces += [(s, -1000.0 - i, 1) for i, s in enumerate(chars)]
        self.ids = {p[0]: i for i, p in enumerate(self.pieces)}

    def encode(self, text):  # with the leading <s> of Llama's tokenizers; the prompts hold known characters alone
        return [1] + [self.ids[s] for s in apply_merges(self.SPACE + text.replace(" ", self.SPACE), self.merges)]

    def write(self, directory):
        def varint(n):
            out = b""
            while n > 127:
                out, n = out + bytes([n & 127 | 128]), n >> 7
            return out + bytes([n])

        def field(number, payload):
            return varint(number << 3 | 2) + varint(len(payload)) + payload

        model = b""
        for text, score, kind in self.pieces:
            model += field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + varint(kind))
        trainer = b"\x18\x02"  # model_type = BPE
        for number, value in ((35, 1), (40, 0), (41, 1), (42, 2)):  # byte_fallback, unk_id, bos_id, eos_id
            trainer += varint(number << 3) + varint(value)
        trainer += varint(43 << 3) + b"\xff" * 9 + b"\x01"  # pad_id = -1
        model += field(2, trainer) + field(3, field(1, b"identity") + b"\x18\x01\x20\x00\x28\x01")
        (directory / "tokenizer.model").write_bytes(model)
        dump(directory / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False,
                                                   "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


# ------------------------------------------------------------------------------------------------ checkpoints

D, FF, LAYERS, HEADS, KV, CTX = 32, 96, 2, 4, 2, 64


def llama_config(architecture, model_type, **more):
    return {"architectures": [architecture], "model_type": model_type, "hidden_size": D, "intermediate_size": FF,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV, "max_position_embeddings": CTX,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, **more}


NEW_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MODELS = {
    # name: (config, dtype, tokenizer, shards)
    "llama-relu-gqa": (llama_config("LlamaForCausalLM", "llama", hidden_act="relu", **NEW_ROPE), "F16", "gpt-2", 1),
    "llama-silu-rope3": (llama_config("LlamaForCausalLM", "llama", hidden_act="silu", num_key_value_heads=4, rope_parameters={
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}, **{"tie_word_embeddings": True}), "F16", "llama-bpe", 2),
    "llama-relu2-linear": (llama_config("LlamaForCausalLM", "llama", hidden_act="relu2", rope_theta=20000.0, attention_bias=True,
                                        mlp_bias=True, rope_scaling={"type": "linear", "factor": 2.0}), "F32", "gpt-2", 1),
    "llama-fatrelu": (llama_config("LlamaForCausalLM", "llama", hidden_act="fatrelu", hidden_act_param=2.0, rope_theta=10000.0), "F16", "gpt-2", 1),
    "mistral-silu": (llama_config("MistralForCausalLM", "mistral", hidden_act="silu", head_dim=16, rope_theta=10000.0, sliding_window=None,
                                  bos_token_id=1, eos_token_id=2), "BF16", "spm", 1),
    "qwen2-relu": (llama_config("Qwen2ForCausalLM", "qwen2", hidden_act="relu", use_sliding_window=False, sliding_window=64,
                                max_window_layers=2, **NEW_ROPE), "F16", "qwen2", 1),
    "qwen3-silu": (llama_config("Qwen3ForCausalLM", "qwen3", hidden_act="silu", head_dim=16, attention_bias=False, rope_theta=1000000.0),
                   "BF16", "qwen2", 3),
    "bamboo-drelu": (llama_config("BambooForCausalLM", "bamboo", hidden_act="relu", rope_theta=10000.0), "F16", "gpt-2", 1),
    "arcee-relu2": (llama_config("ArceeForCausalLM", "arcee", hidden_act="relu2", attention_bias=False, mlp_bias=False, **NEW_ROPE), "F16", "gpt-2", 1),
    "opt-relu": ({"architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu", "do_layer_norm_before": True,
                  "hidden_size": D, "ffn_dim": FF, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "max_position_embeddings": CTX,
                  "word_embed_proj_dim": D, "bos_token_id": 0, "eos_token_id": 0}, "F16", "gpt2-files", 1),
    "falcon-relu": ({"architectures": ["FalconForCausalLM"], "model_type": "falcon", "activation": "relu", "alibi": False, "bias": False,
                     "new_decoder_architecture": True, "parallel_attn": True, "multi_query": True, "hidden_size": D, "ffn_hidden_size": FF,
                     "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_kv_heads": KV, "layer_norm_epsilon": 1e-5,
                     "bos_token_id": 0, "eos_token_id": 0, **NEW_ROPE}, "F16", "falcon", 1),
    "starcoder2-gelu": ({"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh",
                         "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
                         "num_key_value_heads": KV, "max_position_embeddings": CTX, "norm_epsilon": 1e-5, "use_bias": True,
                         "sliding_window": 8, "rope_theta": 100000.0, "bos_token_id": 0, "eos_token_id": 0}, "F32", "starcoder", 1),
}


def shapes(c, n_vocab):
    arch = c["architectures"][0]
    s = {}
    if arch == "OPTForCausalLM":
        s["model.decoder.embed_tokens.weight"] = [n_vocab, D]
        s["model.decoder.embed_positions.weight"] = [CTX + 2, D]
        for l in range(LAYERS):
            p = f"model.decoder.layers.{l}."
            for n in ("q", "k", "v", "out"):
                s[p + f"self_attn.{n}_proj.weight"], s[p + f"self_attn.{n}_proj.bias"] = [D, D], [D]
            for n, (rows, cols) in {"fc1": (FF, D), "fc2": (D, FF)}.items():
                s[p + n + ".weight"], s[p + n + ".bias"] = [rows, cols], [rows]
            for n in ("self_attn_layer_norm", "final_layer_norm"):
                s[p + n + ".weight"], s[p + n + ".bias"] = [D], [D]
        s["model.decoder.final_layer_norm.weight"], s["model.decoder.final_layer_norm.bias"] = [D], [D]
    elif arch == "FalconForCausalLM":
        s["transformer.word_embeddings.weight"] = [n_vocab, D]
        for l in range(LAYERS):
            p = f"transformer.h.{l}."
            s[p + "self_attention.query_key_value.weight"] = [(HEADS + 2 * KV) * D // HEADS, D]
            s[p + "self_attention.dense.weight"] = [D, D]
            s[p + "mlp.dense_h_to_4h.weight"], s[p + "mlp.dense_4h_to_h.weight"] = [FF, D], [D, FF]
            for n in ("ln_attn", "ln_mlp"):
                s[p + n + ".weight"], s[p + n + ".bias"] = [D], [D]
        s["transformer.ln_f.weight"], s["transformer.ln_f.bias"] = [D], [D]
    elif arch == "Starcoder2ForCausalLM":
        n_kv = KV * D // HEADS
        s["model.embed_tokens.weight"], s["model.norm.weight"], s["model.norm.bias"] = [n_vocab, D], [D], [D]
        for l in range(LAYERS):
            p = f"model.layers.{l}."
            for n, (rows, cols) in {"self_attn.q_proj": (D, D), "self_attn.k_proj": (n_kv, D), "self_attn.v_proj": (n_kv, D),
                                    "self_attn.o_proj": (D, D), "mlp.c_fc": (FF, D), "mlp.c_proj": (D, FF)}.items():
                s[p + n + ".weight"], s[p + n + ".bias"] = [rows, cols], [rows]
            for n in ("input_layernorm", "post_attention_layernorm"):
                s[p + n + ".weight"], s[p + n + ".bias"] = [D], [D]
    else:
        head_dim = c.get("head_dim", D // HEADS)
        n_q, n_kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
        s["model.embed_tokens.weight"], s["model.norm.weight"] = [n_vocab, D], [D]
        if not c["tie_word_embeddings"]:
            s["lm_head.weight"] = [n_vocab, D]
        for l in range(LAYERS):
            p = f"model.layers.{l}."
            s[p + "input_layernorm.weight"], s[p + "post_attention_layernorm.weight"] = [D], [D]
            linear = {"self_attn.q_proj": (n_q, D), "self_attn.k_proj": (n_kv, D), "self_attn.v_proj": (n_kv, D), "self_attn.o_proj": (D, n_q),
                      "mlp.gate_proj": (FF, D), "mlp.up_proj": (FF, D), "mlp.down_proj": (D, FF)}
            if arch == "ArceeForCausalLM":
                del linear["mlp.gate_proj"]
            for n, (rows, cols) in linear.items():
                s[p + n + ".weight"] = [rows, cols]
                attention_part = n.startswith("self_attn")
                qwen2_bias = arch == "Qwen2ForCausalLM" and attention_part and "o_proj" not in n
                if qwen2_bias or c.get("attention_bias" if attention_part else "mlp_bias"):
                    s[p + n + ".bias"] = [rows]
            if arch == "Qwen3ForCausalLM":
                s[p + "self_attn.q_norm.weight"], s[p + "self_attn.k_norm.weight"] = [head_dim], [head_dim]
    return s


def random_weights(c, n_vocab, dtype, seed):
    rng, w = np.random.default_rng(seed), {}
    for name, shape in shapes(c, n_vocab).items():
        x = rng.standard_normal(shape)
        if len(shape) == 2:
            x *= 1.0 / math.sqrt(D)  # pre-activations of order one
        elif "norm" in name or "ln_" in name:
            x = 0.1 * x + (0 if name.endswith("bias") else 1)
        else:
            x *= 0.3
        w[name] = rounded(x, dtype)
    return w


def continue_greedily(c, w, ids, n):
    ids, margin, start = list(ids), math.inf, len(ids)
    while len(ids) < start + n:
        logits = forward(c, w, ids)[-1]
        order = np.argsort(-logits)
        margin = min(margin, logits[order[0]] - logits[order[1]])
        ids.append(int(order[0]))
    return ids[start:], float(margin)


def well_conditioned(c, w, golden):
    """A clear choice at every step, and logits that an f16 cache moves by clearly less than what a test may allow: one rounding
    of relative size 2^-11 in each layer's keys and values, 4 standard deviations. (FATReLU jumps at its threshold, so a
    neuron near it would make any comparison meaningless.)"""
    global F16_CACHE
    ids = golden["ids"] + golden["greedy_ids"]
    exact = forward(c, w, ids)
    F16_CACHE = True
    moved = np.abs(forward(c, w, ids) - exact).max(-1)
    F16_CACHE = False
    allowed = 4 * c["num_hidden_layers"] * 2.0**-11 * np.sqrt((exact * exact).mean(-1))
    return golden["min_greedy_margin"] > 0.01 and (moved < 0.8 * allowed).all()


def goldens(c, w, tokenizer):  # None when the checkpoint makes a poor test
    out = []
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer.encode(prompt)
        logits = forward(c, w, ids)
        greedy, margin = continue_greedily(c, w, ids, 16)
        top = np.argsort(-logits[-1])[:8]
        golden = {"prompt": prompt, "ids": ids, "last_logits": np.round(logits[-1], 5).tolist(),
                  "mean_abs_logit_per_position": np.round(np.abs(logits).mean(-1), 6).tolist(),
                  "top8_ids": top.tolist(), "top8": np.round(logits[-1][top], 6).tolist(),
                  "greedy_ids": greedy, "min_greedy_margin": round(margin, 6)}
        if i == 0:
            golden["logits"] = np.round(logits, 5).tolist()
        if not well_conditioned(c, w, golden):
            return None
        out.append(golden)
    return out


def dump(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def make(name):
    c, dtype, kind, shards = MODELS[name]
    directory = HERE / name
    directory.mkdir(exist_ok=True)
    tokenizer = SentencePiece() if kind == "spm" else ByteBpe()
    n_tokens = len(tokenizer.pieces if kind == "spm" else tokenizer.vocab)
    c = dict(c, vocab_size=n_tokens + (8 if name == "qwen2-relu" else 0))  # some embeddings have more rows than tokens
    for seed in range(2000):
        w = random_weights(c, c["vocab_size"], dtype, seed)
        w64 = {k: v.astype(np.float64) for k, v in w.items()}
        g = goldens(c, w64, tokenizer)
        if g is not None:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a well-conditioned checkpoint")
    dump(directory / "config.json", c)
    dump(directory / "goldens.json", {"made_by": "make_zoo.py, float64", "dtype": f"weights rounded to {dtype}", "seed": seed,
                                      "ffn": "relu(gate)*relu(up)" if "drelu" in name else None, "goldens": g})
    if kind == "spm":
        tokenizer.write(directory)
    elif kind == "gpt2-files":
        tokenizer.write_gpt2_files(directory)
    else:
        tokenizer.write(directory, kind, pairs=kind != "gpt-2")
    if shards == 1:
        write_safetensors(directory / "model.safetensors", w, dtype)
        return
    names, weight_map = sorted(w), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {n: w[n] for n in names[i::shards]}  # a layer's tensors end up in different shards, as in large models
        write_safetensors(directory / file, part, dtype)
        weight_map.update({n: file for n in part})
    dump(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def check(directory):
    c = {"tie_word_embeddings": False, **json.loads((directory / "config.json").read_text())}
    w = read_safetensors(directory)
    recorded = json.loads((directory / "goldens.json").read_text())
    worst = 0
    for g in recorded["goldens"]:
        logits = forward(c, w, g["ids"], drelu=bool(recorded["ffn"]))
        worst = max(worst, np.abs(logits[-1] - g["last_logits"]).max())
    print(f"{directory.name}: largest difference {worst:.2e}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(pathlib.Path(sys.argv[2]))
    else:
        for model in sys.argv[1:] or MODELS:
            make(model)
