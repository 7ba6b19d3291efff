"""Harmony, the format of gpt-oss: messages with a role, a channel and perhaps a recipient, between special tokens.

    message.py         a message, the special tokens by name, messages to token ids, and the grammars of answers
    conversation.py    OpenAI's messages and tools to harmony's messages
    header.py          parses a message's header: role, channel and recipient
    reader.py          an answer's text and special tokens to messages, piece by piece; to the text pipeline's parts
    prompt.py          detects harmony, and the state at a prompt's end

Rendering and reading follow the package `openai-harmony`; `tests/runtime/text/harmony` compares the two.
"""
