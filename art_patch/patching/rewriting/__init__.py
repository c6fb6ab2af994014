"""Makes the app's requests into requests to the engine, and checks and rewrites the engine's answers for the app."""
