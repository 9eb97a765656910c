"""The parts that commands share: declaration, options, output, audit log."""
