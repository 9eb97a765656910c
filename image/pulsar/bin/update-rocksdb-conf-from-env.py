#!/usr/bin/env python3
from bkctl.commands.pulsar_programs import main

main()
