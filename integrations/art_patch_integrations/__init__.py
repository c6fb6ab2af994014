"""Integrations with agent frameworks, one module a framework.

`art_patch.patch()` arms every entry point of the group `art_patch.integrations`: its function is called with the
framework's module when the app imports that framework, never before. Third parties use the same door. None is
needed to record or route calls; an integration adds what the SDK cannot know, such as node names and tool results.
"""
