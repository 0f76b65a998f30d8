"""Hidden-state shards on disk: format, writer, reader, inspection."""
