from .executor import RawModule
