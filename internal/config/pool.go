package config

import "fmt"

// Pool is how many machines are kept ready for sandboxes to come.
type Pool struct {
	// MaxMemory bounds the memory of all of them; 0 = none are kept.
	MaxMemory Size `toml:"max_memory"`
	// MaxPerTemplate bounds how many there are of one template's build.
	MaxPerTemplate int `toml:"max_per_template"`
}

func (p *Pool) validate() error {
	if p.MaxPerTemplate < 1 {
		return fmt.Errorf("pool.max_per_template = %d must be at least 1; without a pool, pool.max_memory is 0", p.MaxPerTemplate)
	}
	return nil
}
