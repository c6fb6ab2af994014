"""Defences against a judge that can be fooled, such as planted bad answers; and a measure of how good a judge is."""
