"""What `dg list components` shows and `dg scaffold defs` writes: a script, the resource, a service's autoscaler.

`dg` imports this module in every project that has the package installed, so nothing here may reach for the network.
"""

from crater_dagster.components.autoscaler import CraterServiceAutoscalerComponent
from crater_dagster.components.resource import CraterResourceComponent
from crater_dagster.components.script import CraterScriptComponent

__all__ = ["CraterResourceComponent", "CraterScriptComponent", "CraterServiceAutoscalerComponent"]
