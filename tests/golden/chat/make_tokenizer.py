"""Make the tokenizer of the chats, a byte-level BPE of 1,000 tokens that has seen their texts: `tokenizer.json`.

    python tests/golden/chat/make_tokenizer.py

It encodes any text. The marks of the templates are special tokens, and it puts <s> before a text unless it is told not to.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
MARKS = """
<s> </s> <|im_start|> <|im_end|> <tool_call> </tool_call> <think> </think> <|start_header_id|> <|end_header_id|> <|eot_id|>
<|start|> <|message|> <|channel|> <|end|> <|call|> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS]
[TOOL_RESULTS] [/TOOL_RESULTS]
"""

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=1000,
    special_tokens=MARKS.split(),
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
)
tokenizer.train([str(HERE / "conversations.jsonl"), *(str(path) for path in sorted(HERE.glob("*.jinja")))], trainer)
tokenizer.post_processor = processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
)
(HERE / "tokenizer.json").write_text(tokenizer.to_str() + "\n", encoding="utf-8")
