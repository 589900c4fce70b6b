package stack

import (
	"os"
	"path/filepath"

	"github.com/cubesandbox/cube/internal/config"
)

// OpenLog opens the log of a stack that runs in the background.
func OpenLog(cfg *config.Config) (*os.File, error) { return openLog(cubeLog(cfg)) }

// LogTail is that log's end, on one line.
func LogTail(cfg *config.Config) string { return logTail(cubeLog(cfg), 0) }

func cubeLog(cfg *config.Config) string { return filepath.Join(cfg.LogDir(), "cube.log") }
