package config

import (
	"fmt"
	"time"

	"github.com/docker/go-units"
)

// Templates is how templates are made.
type Templates struct {
	// Cache bounds what builds keep of their steps for builds to come: the disks as they were then, each counted as far as it differs
	// from the one before. 0 = nothing is kept.
	Cache Size `toml:"cache"`
	// ReadyTimeout is how long what a template runs may take to be ready.
	ReadyTimeout Duration `toml:"ready_timeout"`
}

func defaultTemplates() Templates {
	return Templates{Cache: 4 * units.GiB, ReadyTimeout: Duration(5 * time.Minute)}
}

func (t *Templates) validate() error {
	if time.Duration(t.ReadyTimeout) < time.Second {
		return fmt.Errorf("templates.ready_timeout = %q must be at least a second", time.Duration(t.ReadyTimeout))
	}
	return nil
}
