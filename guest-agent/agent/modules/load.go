package modules

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// LoadList loads the modules whose files a list names, one per line, in that order. It goes on after a failure, since a
// module for absent hardware refuses to load, and returns all failures.
func LoadList(list string) error {
	f, err := os.Open(list)
	if err != nil {
		return err
	}
	defer f.Close()
	var errs []error
	s := bufio.NewScanner(f)
	for s.Scan() {
		if file := strings.TrimSpace(s.Text()); file != "" {
			errs = append(errs, load(file))
		}
	}
	return errors.Join(append(errs, s.Err())...)
}

// load loads one file. A module that is there already isn't an error.
func load(file string) error {
	if _, err := os.Stat(filepath.Join("/sys/module", moduleName(file), "initstate")); err == nil {
		return nil
	}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	flags := 0
	if !strings.HasSuffix(file, ".ko") { // .ko.xz, .ko.zst
		flags = unix.MODULE_INIT_COMPRESSED_FILE
	}
	if err := unix.FinitModule(int(f.Fd()), "", flags); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load module %s: %w", file, err)
	}
	return nil
}
