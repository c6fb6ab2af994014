"""Integrations with agent frameworks, one module a framework.

`art_patch.patch()` arms every entry point of the group `art_patch.integrations`. When the app imports a framework, the
entry point's function is called with the framework's module, never before. Packages of others register integrations the
same way. Calls are recorded and routed without an integration; it adds what the SDK cannot know, such as the names of
nodes and the results of tools.
"""
