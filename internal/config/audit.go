package config

import (
	"fmt"

	"github.com/docker/go-units"
)

// Audit bounds what is kept of the record of what was done: MaxFiles files of at most MaxSize each.
type Audit struct {
	MaxSize  Size `toml:"max_size"`
	MaxFiles int  `toml:"max_files"`
}

func (a *Audit) validate() error {
	switch {
	case a.MaxSize < 64*units.KiB:
		return fmt.Errorf("audit.max_size = %s must be at least 64KiB", a.MaxSize)
	case a.MaxFiles < 1 || a.MaxFiles > 1000:
		return fmt.Errorf("audit.max_files = %d must be between 1 and 1000", a.MaxFiles)
	}
	return nil
}
