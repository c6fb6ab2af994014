"""Defences against a judge that can be fooled: planted answers, known pleas, both orders; and a test of the judge."""
