"""Codecs: between pictures and the tokens that the language models draw."""
