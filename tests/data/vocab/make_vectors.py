#!/usr/bin/env python3
"""Makes the small vocabularies of this folder and the token ids that the reference libraries give for them.

  pip install tokenizers sentencepiece gguf jinja2
  python make_vectors.py ../../../../shared/text/stories-heldout.txt

The training text is public domain (see ../shared/README.md); only tokens and merges learned from it are stored.
  bpe.gguf, bpe_vectors.json   byte-level BPE; ids by Hugging Face's tokenizers with each family's own pre-tokenizer
  spm.gguf, spm_vectors.json   SentencePiece BPE with byte fallback; ids by sentencepiece
  chat_vectors.json            chats rendered by jinja2 from the models' templates
  ../../fuzz/corpus/tokenizer  tiny vocabularies that the fuzz target starts from
"""
import io
import json
import pathlib
import random
import sys

import gguf
import jinja2
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, models, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # control tokens
USER_DEFINED = ["<tool>", "    "]  # found in text in any case

# The pre-tokenizers as the models' tokenizer.json files have them.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
FIRST = r"[^\r\n\p{L}\p{N}]?"


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_level(use_regex=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def cl100k(digits, punctuation=r" ?[^\s\p{L}\p{N}]+[\r\n]*"):
    return [split(CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + "|" + punctuation + "|" + SPACES), byte_level()]


# The cased letters as deepseek-llm lists them.
DEEPSEEK_LETTERS = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}"
    r"\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}"
    r"\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}"
    r"\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}"
    r"\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}"
    r"\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}"
    r"\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}"
    r"\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}"
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}"
    r"\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}"
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}")
BLOOM = split(r" ?[^(\s|[.,!?…。，、।۔،])]+")
PRE = {
    "gpt-2": [byte_level(True)],
    "llama-bpe": cl100k(r"\p{N}{1,3}"),
    "qwen2": cl100k(r"\p{N}"),
    "seed-coder": cl100k(r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+"),
    "falcon": [pre_tokenizers.Punctuation("contiguous"), byte_level(True), split("[0-9][0-9][0-9]")],
    "starcoder": [pre_tokenizers.Digits(individual_digits=True), byte_level(True)],
    "bloom": [BLOOM, byte_level()],
    "viking": [BLOOM, pre_tokenizers.Digits(individual_digits=True), byte_level()],
    "deepseek-coder": [split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split("[一-龥ࠀ-一가-\ud7ff]+"),
                       pre_tokenizers.Digits(individual_digits=True), byte_level()],
    "qwen35": [split(CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES),
               byte_level()],
    "deepseek-llm": [split(r"[\r\n]"), split(r"\s?[" + DEEPSEEK_LETTERS + "]+"),
                     split(r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"), split(r"\s+$"),
                     split("[一-龥ࠀ-一가-\ud7ff]+"), pre_tokenizers.Digits(individual_digits=True), byte_level()],
    "deepseek-v3": [split(r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"),
                    split(r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                          r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES), byte_level()],
    "tekken": [split(FIRST + UPPER + "*" + LOWER + "+|" + FIRST + UPPER + "+" + LOWER +
                     r"*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES), byte_level()],
    "gpt-4o": [split(FIRST + UPPER + "*" + LOWER + "+" + CONTRACTIONS + "?|" + FIRST + UPPER + "+" + LOWER + "*" +
                     CONTRACTIONS + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES), byte_level()],
}
IGNORE_MERGES = {"llama-bpe", "tekken"}

TEXTS = [
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\t\n", "\r\n", " \r\n \n", "a", " a", "a ", "Hello world",
    " Hello World!", "Hello, y'all! How are you 😁 ?我想在apple工作1314151天～", "I've you'll he'D WE'RE it'S 'twas 'LL",
    "3", "33", "333", "3333", "33333", "3 33 333 4444 55555 3.14159 1,000,000 ½ ² Ⅻ ٣٤٥", "!!!!!!", "... --- ======",
    "\n =", "' era", "don't", "HTTPServer camelCase XMLHttpRequest iPhone ÀÉÎ ÀéÎö Straße ǅungla",
    "нещо на Български", "កាន់តែពិសេសអាចខលចេញ", "日本語のテキスト、漢字とかな。カタカナ", "한국어 문장입니다.", "العربية نص", "हिन्दी में पाठ",
    "🚀 (normal) 😶‍🌫️ (multiple emojis concatenated) ✅", "e\u0301 cafe\u0301 naïve", "\u00a0\u2003\u3000x\u3000\u00a0y\u0085z",
    "\u180ex\u200by\ufeffz", "snake_case_name = foo->bar[0] + 0x1F; // comment", "path/to/file.txt\nC:\\dir\\x", "$5+4<=>^~|`",
    "a  b   c    d     e", "tabs\t\tand\tspaces \t mixed", "line1\nline2\r\nline3\n\n\nline5  \n  indented",
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n", "text<|endoftext|>more <|endoftext|> end", "a<tool>b <tool>",
    "<|im_start|", "<|endoftext|><|endoftext|>", "ſ 'ſ K Ω", "\x00\x01\x7f control", "…。，、।۔،(|)", "\U00010400\U0001F9D9",
    "Once upon a time, there was a little girl who lived in a village near the forest.",
    "    Hello\n        Hello", "x" * 100, " " * 40 + "x", "ab" * 60, "1" * 50, "\n" * 20 + "y", "@user #tag https://e.org/?q=1&r=2",
    "stop!!\n\ngo", "x //\r\ny", "fooBar BarFOO FOObar", "ABC's abc'S", "(word) .word _word", "7th 1st 42nd", "a1b22c333d4444",
]


def random_texts(n, seed=7):
    rng = random.Random(seed)
    pools = ["abcdefghijklmnopqrstuvwxyz", "ABCXYZ", "0123456789", "    \n\t\r", ".,!?'\"-()[]<>|$", "éüßñçø", "жщюя", "漢字仮名", "가나다",
             "😀🎉✨", "\u0301\u200d", "½²٣", "'s't'll're"]
    return ["".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 60))) for _ in range(n)]


def write_gguf(path, model, pre, tokens, types, scores=None, merges=None, keys=()):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    if scores is not None:
        writer.add_token_scores(scores)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    for method, value in keys:
        getattr(writer, method)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write_json(name, value):
    # Lone surrogates do not occur, so the file is UTF-8; one line a text keeps differences readable.
    lines = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    (HERE / name).write_text(lines.replace("],[", "],\n[").replace('","', '",\n"') + "\n")


def make_bpe(text):
    # Trained on lines without any splitting into words, and much on the tricky texts themselves: merges cross words, so wrong
    # splits give wrong ids.
    corpus = text.splitlines()[:600] + [t for t in TEXTS if "<" not in t] * 40 + ["!!\n\n"] * 400
    base = tokenizers.Tokenizer(models.BPE())
    base.pre_tokenizer = byte_level(False)
    base.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=12, show_progress=False))
    state = json.loads(base.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["merges"]]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    types = [gguf.TokenType.NORMAL] * len(tokens)
    types += [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.USER_DEFINED] * len(USER_DEFINED)
    write_gguf(HERE / "bpe.gguf", "gpt2", "gpt-2", tokens + SPECIAL + USER_DEFINED, types, merges=merges,
               keys=[("add_bos_token_id", len(tokens)), ("add_eos_token_id", len(tokens)), ("add_add_bos_token", False)])
    texts = TEXTS + random_texts(60)
    ids = {}
    for name, parts in PRE.items():
        model = models.BPE(vocab=state["vocab"], merges=[tuple(m.split(" ")) for m in merges],
                           ignore_merges=name in IGNORE_MERGES)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
        tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in USER_DEFINED])
        ids[name] = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
    write_json("bpe_vectors.json", {"texts": texts, "ids": ids})


def make_spm(text):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()[:3000]), model_writer=model, model_type="bpe", vocab_size=900,
        byte_fallback=True, character_coverage=0.999, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=True, allow_whitespace_only_pieces=True, split_digits=True, minloglevel=2)
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    kinds = {1: gguf.TokenType.NORMAL, 2: gguf.TokenType.UNKNOWN, 3: gguf.TokenType.CONTROL, 4: gguf.TokenType.USER_DEFINED,
             5: gguf.TokenType.UNUSED, 6: gguf.TokenType.BYTE}
    write_gguf(HERE / "spm.gguf", "llama", "default", [p.piece for p in proto.pieces], [kinds[p.type] for p in proto.pieces],
               scores=[p.score for p in proto.pieces], keys=[("add_bos_token_id", 1), ("add_eos_token_id", 2),
                                                              ("add_unk_token_id", 0), ("add_add_bos_token", True)])
    # sentencepiece reads U+2581 as a space, and drops NUL bytes: texts with either are left out.
    texts = [t for t in TEXTS + random_texts(60, seed=8) if "\x00" not in t]
    result = {"texts": texts}
    for key, squeeze in (("ids", False), ("ids_remove_extra_whitespaces", True)):
        proto.normalizer_spec.remove_extra_whitespaces = squeeze
        processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        result[key] = [processor.encode(t) for t in texts]
    write_json("spm_vectors.json", result)


# From the models' tokenizer_config.json: Qwen1.5, Llama 3 Instruct, Llama 2 Chat, Mistral 7B Instruct v0.2.
CHAT_TEMPLATES = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
              "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "llama3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
              "message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 "
              "%}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
              "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "llama2": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = "
              "messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
              "{% for message in loop_messages %}{% if loop.index0 == 0 and system_message != false %}{% set content = "
              "'<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = "
              "message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + "
              "' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}"
              "{% endfor %}",
    "mistral": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + "
               "message['content'] | trim + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | "
               "trim + eos_token }}{% endif %}{% endfor %}",
}


def make_chats():
    system = [{"role": "system", "content": "Be brief."}]
    turns = [{"role": "user", "content": "Who are you? "}, {"role": "assistant", "content": "A hearth."},
             {"role": "user", "content": "Warm\nor cold?"}]
    cases = []
    for family, source in CHAT_TEMPLATES.items():
        for messages in (turns[:1], turns) if family == "mistral" else (turns[:1], turns, system + turns):
            for add_generation_prompt in (True, False):
                text = jinja2.Template(source).render(messages=messages, bos_token="<s>", eos_token="</s>",
                                                      add_generation_prompt=add_generation_prompt)
                cases.append({"family": family, "messages": messages, "add_generation_prompt": add_generation_prompt,
                              "text": text.removeprefix("<s>")})  # hearth leaves the first BOS to encode()
    write_json("chat_vectors.json", {"templates": CHAT_TEMPLATES, "cases": cases})


def make_fuzz_corpus():
    corpus = HERE.parents[1] / "fuzz" / "corpus" / "tokenizer"
    corpus.mkdir(parents=True, exist_ok=True)
    normal, control, user, byte = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED,
                                   gguf.TokenType.BYTE)
    for pre in ("gpt-2", "llama-bpe", "deepseek-v3"):
        write_gguf(corpus / f"bpe-{pre}.gguf", "gpt2", pre, ["a", "b", "c", "ab", "Ġ", "Ġab", "<|end|>", "  "],
                   [normal] * 6 + [control, user], merges=["a b", "Ġ ab"],
                   keys=[("add_bos_token_id", 6), ("add_eos_token_id", 6), ("add_add_bos_token", True),
                         ("add_chat_template", CHAT_TEMPLATES["chatml"])])
    write_gguf(corpus / "spm.gguf", "llama", "default", ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "▁a", "ab", "▁▁"],
               [gguf.TokenType.UNKNOWN, control, control, byte] + [normal] * 4, scores=[0, 0, 0, 0, -4, -1, -2, -3],
               keys=[("add_bos_token_id", 1), ("add_eos_token_id", 2), ("add_chat_template", CHAT_TEMPLATES["llama2"])])


if __name__ == "__main__":
    training_text = pathlib.Path(sys.argv[1]).read_text().replace("<|endoftext|>", "")
    make_bpe(training_text)
    make_spm(training_text)
    make_chats()
    make_fuzz_corpus()
