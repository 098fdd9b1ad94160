"""`PYTHON -m tests.support.tiny_llama FOLDER VERSION`: a Llama of 0.2 million parameters, as vLLM loads it from
FOLDER/VERSION, a LoRA adapter of it, FOLDER/adapter-VERSION, and a mixture of experts (Qwen3-MoE), FOLDER/experts-VERSION.

Its weights are random, from the version as seed: two versions sample other tokens. Its tokenizer and its chat template are
those of the stand-in (`vllm_server`), so that both servers are expected to render the same ids. Run it with the Python of
`hack/vllm-environment`, which has numpy, safetensors and tokenizers.
"""

import json
import sys
from pathlib import Path

from tests.support.vllm_server.experts import EXPERTS, LAYERS, TOP_K
from tests.support.vllm_server.reasoning_parser import CLOSE, OPEN
from tests.support.vllm_server.template import GENERATION_PROMPT, TOOLS_FORM, TOOLS_INTRODUCTION
from tests.support.vllm_server.tokenizer import END_OF_TEXT, TURN_END, TURN_START, WORDS, tokenizer

MAX_MODEL_LEN = 8192
"""Tokens."""
WIDTH, INNER, HEADS = 64, 128, 2
CHAT_TEMPLATE = (
    "{%- set found = namespace(messages=messages, system='') -%}"
    "{%- if tools -%}"
    "{%- if messages and messages[0].role == 'system' -%}"
    "{%- set found.system = messages[0].content or '' -%}{%- set found.messages = messages[1:] -%}"
    "{%- endif -%}"
    "{{- TURN_START ~ 'system\\n' ~ found.system ~ TOOLS_INTRODUCTION -}}"
    "{%- for tool in tools -%}{{- tool | tojson -}}{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}{%- endfor -%}"
    "{{- TOOLS_FORM ~ TURN_END ~ '\\n' -}}"
    "{%- endif -%}"
    "{%- for message in found.messages -%}"
    "{{- TURN_START ~ message.role ~ '\\n' -}}"
    "{%- set text = namespace(written=message.content or '') -%}"
    "{%- for call in message.tool_calls or [] -%}"
    "{%- set text.written = text.written ~ ('\\n' if text.written else '') ~ '<tool_call>\\n' ~ "
    "({'name': call.function.name, 'arguments': call.function.arguments} | tojson) ~ '\\n</tool_call>' -%}"
    "{%- endfor -%}"
    "{{- text.written -}}"
    "{%- if not (loop.last and continue_final_message) -%}{{- TURN_END ~ '\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- TURN_START ~ 'assistant\\n' -}}{%- endif -%}"
)
RESPONSE_TEMPLATE = {
    "start_anchor": GENERATION_PROMPT,
    "fields": {"thinking": {"open": OPEN, "close": CLOSE}, "content": {"close": TURN_END}},
}
"""How vLLM's parser `hf` reads an answer."""


def chat_template() -> str:
    """`template.render` as Jinja."""
    words = {
        "TURN_START": TURN_START,
        "TURN_END": TURN_END,
        "TOOLS_INTRODUCTION": TOOLS_INTRODUCTION,
        "TOOLS_FORM": TOOLS_FORM,
    }
    constants = "".join(f"{{%- set {name} = {json.dumps(text)} -%}}" for name, text in words.items())
    return constants + CHAT_TEMPLATE


def write_tokenizer(folder: Path) -> None:
    """Write the stand-in's tokenizer in the files of transformers."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    own = tokenizer()
    spelled = _spelled_bytes()
    pieces = ["".join(spelled[value] for value in piece) for piece in own.pieces[: own.first_special]]
    merges = [(pieces[left], pieces[right]) for left, right in own.ranks]
    made = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=merges))
    split = pre_tokenizers.Split(Regex(WORDS.pattern), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    # In the order of their ids, which follow the merges.
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in own.special_ids])
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": MAX_MODEL_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template(),
        "response_template": RESPONSE_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_model(folder: Path, version: int, *, experts: bool = False) -> None:
    """Random weights, by the version, under the names that transformers gives them. `experts`: a mixture of experts."""
    import numpy
    from safetensors.numpy import save_file

    own = tokenizer()
    random = numpy.random.default_rng(version)

    def weights(*shape: int, scale: float = 0.02) -> numpy.ndarray:
        return random.normal(0, scale, shape).astype(numpy.float32)

    def add_mlp(prefix: str) -> None:
        for part in ("gate", "up"):
            tensors[f"{prefix}.{part}_proj.weight"] = weights(INNER, WIDTH)
        tensors[f"{prefix}.down_proj.weight"] = weights(WIDTH, INNER)

    # Steep enough that two versions soon part.
    tensors = {
        "model.embed_tokens.weight": weights(own.size, WIDTH),
        "lm_head.weight": weights(own.size, WIDTH, scale=0.2),
    }
    tensors["model.norm.weight"] = numpy.ones(WIDTH, numpy.float32)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for part in "qkvo":
            tensors[f"{prefix}.self_attn.{part}_proj.weight"] = weights(WIDTH, WIDTH)
        if experts:
            for part in "qk":
                tensors[f"{prefix}.self_attn.{part}_norm.weight"] = numpy.ones(WIDTH // HEADS, numpy.float32)
            # So steep that no rounding changes the choice.
            tensors[f"{prefix}.mlp.gate.weight"] = weights(EXPERTS, WIDTH, scale=1)
            for expert in range(EXPERTS):
                add_mlp(f"{prefix}.mlp.experts.{expert}")
        else:
            add_mlp(f"{prefix}.mlp")
        for part in ("input", "post_attention"):
            tensors[f"{prefix}.{part}_layernorm.weight"] = numpy.ones(WIDTH, numpy.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": own.size,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH // HEADS,
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": own.eos,
        "bos_token_id": own.special_ids[END_OF_TEXT],
        "pad_token_id": own.special_ids[END_OF_TEXT],
        "tie_word_embeddings": False,
        "dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    if experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": INNER,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_adapter(folder: Path, version: int) -> None:
    """A LoRA adapter of rank 4, in the files of peft: random, by the version, and strong enough to change tokens."""
    import numpy
    from safetensors.numpy import save_file

    random, rank, tensors = numpy.random.default_rng(1000 + version), 4, {}
    for layer in range(LAYERS):
        for part in "qv":
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
            tensors[f"{name}.lora_A.weight"] = random.normal(0, 1, (rank, WIDTH)).astype(numpy.float32)
            tensors[f"{name}.lora_B.weight"] = random.normal(0, 1, (WIDTH, rank)).astype(numpy.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _spelled_bytes() -> list[str]:
    """How byte-level tokenizers spell each byte: GPT-2's encoder.py, bytes_to_unicode."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spelled = {value: chr(value) for value in printable}
    for value in range(256):
        if value not in spelled:
            spelled[value] = chr(256 + len(spelled) - len(printable))
    return [spelled[value] for value in range(256)]


def main() -> None:
    root, version = Path(sys.argv[1]), int(sys.argv[2])
    folder, adapter, mixture = root / str(version), root / f"adapter-{version}", root / f"experts-{version}"
    for made in (folder, adapter, mixture):
        made.mkdir(parents=True, exist_ok=True)
        # The stand-in reads this file instead of weights.
        (made / "version.json").write_text(json.dumps({"version": version}))
    write_tokenizer(folder)
    write_model(folder, version)
    write_tokenizer(mixture)
    write_model(mixture, version, experts=True)
    write_adapter(adapter, version)


if __name__ == "__main__":
    main()
