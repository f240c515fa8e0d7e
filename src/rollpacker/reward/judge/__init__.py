"""The LLM judge: a language model that grades responses, most of its layers in host memory."""
