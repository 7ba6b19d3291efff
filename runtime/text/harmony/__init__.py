"""Harmony, the format of gpt-oss: messages with a role, a channel and perhaps a recipient, between special tokens.

    message.py         a message, and the special tokens by name
    typescript.py      a function's JSON schema as a TypeScript type
    system_text.py     the contents of the system and developer messages
    conversation.py    OpenAI's messages and tools to harmony's messages
    render.py          messages to token ids
    header.py          parses a message's header: role, channel and recipient
    reader.py          an answer's text and special tokens to messages, piece by piece
    parse.py           token ids to whole messages
    answer_parts.py    the same for the text pipeline: reasoning, tool calls, content
    grammar.py         grammars that force calls, or an answer's form in the final channel
    prompt.py          detects harmony, and the state at a prompt's end

Rendering and reading follow the package `openai-harmony`; `tools/comparing/compare_harmony.py` compares the two.
"""
