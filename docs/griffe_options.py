"""Shows the options of `@takes_options(Options)` as parameters: griffe reads the source, where they are one argument."""

from __future__ import annotations

from typing import Any

import griffe


class Options(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for module in pkg.modules.values():
            if not module.is_alias:
                self.on_package(pkg=module)
        for function in pkg.functions.values():
            for decorator in () if function.is_alias else function.decorators:
                name, _, kind = str(decorator.value).rstrip(")").partition("(")
                if name == "takes_options":
                    target = next(iter(function.parameters))
                    options = pkg[kind].final_target if pkg[kind].is_alias else pkg[kind]
                    function.parameters = griffe.Parameters(target, *list(options.parameters)[1:])
