"""Silent training mistakes that people made in public, each with its mended twin, and unusual programs without one."""
