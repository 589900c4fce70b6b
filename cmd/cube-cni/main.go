// Command cube-cni is Cube's CNI plugin. Package cni/plugin says what it takes.
package main

import "github.com/cubesandbox/cube/cni/plugin"

func main() { plugin.Main() }
