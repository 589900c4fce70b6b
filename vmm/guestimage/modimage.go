package guestimage

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/Microsoft/hcsshim/ext4/tar2ext4"

	"github.com/cubesandbox/cube/vmm/artefact"
)

// modulesImageMax bounds the modules image. The file is as large as what is in it.
const modulesImageMax = 1 << 30

// EnvdPath is where the modules image has cube-envd, beside what stands for /lib/modules/<release>.
const EnvdPath = "tools/cube-envd"

// writeModulesImage writes the read-only ext4 image with what the guest doesn't need at boot.
func writeModulesImage(file string, s *moduleSet, envd string) error {
	t, err := modulesTree(s)
	if err != nil {
		return err
	}
	t.Add(EnvdPath, artefact.Node{Mode: 0o755, Source: envd})
	w, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	defer w.Close()
	r, pipe := io.Pipe()
	go func() { pipe.CloseWithError(writeTar(pipe, t)) }()
	err = tar2ext4.ConvertTarToExt4(r, w, tar2ext4.MaximumDiskSize(modulesImageMax))
	return errors.Join(err, r.Close(), w.Close())
}

// modulesTree chooses the modules, and of depmod's files the lines about them.
func modulesTree(s *moduleSet) (artefact.Tree, error) {
	names := slices.Concat(bootModules, offeredModules, s.matching(offered, withheld))
	if len(s.files) == 0 {
		// Built without modules: what this kernel has not built in it does without, but for what booting takes.
		names = bootModules
	}
	chosen, err := s.order(names...)
	if err != nil {
		return nil, err
	}
	t := artefact.Tree{}
	for _, name := range chosen {
		t.Add(s.files[name], artefact.Node{Mode: 0o644, Source: filepath.Join(s.dir, s.files[name])})
	}
	for file, module := range map[string]func(string) string{
		"modules.dep": func(line string) string { file, _, _ := strings.Cut(line, ":"); return file },
		// alias <pattern> <module>
		"modules.alias": func(line string) string { return line[strings.LastIndexByte(line, ' ')+1:] },
		// softdep <module> pre: … post: …
		"modules.softdep": func(line string) string { return append(strings.Fields(line), "", "")[1] },
	} {
		b, err := s.filter(file, chosen, module)
		if err != nil {
			return nil, err
		}
		t.Add(file, artefact.Node{Mode: 0o644, Data: b})
	}
	t.Add("modules.builtin", artefact.Node{Mode: 0o644, Source: filepath.Join(s.dir, "modules.builtin")})
	return t, nil
}

func writeTar(w io.Writer, t artefact.Tree) error {
	tw := tar.NewWriter(w)
	for _, at := range t.Paths() {
		if err := writeTarNode(tw, at, t[at]); err != nil {
			return err
		}
	}
	return tw.Close()
}

func writeTarNode(tw *tar.Writer, at string, n artefact.Node) error {
	h := &tar.Header{Name: at, Mode: int64(n.Mode.Perm()), ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
	if n.Mode.Type() == fs.ModeDir {
		h.Typeflag = tar.TypeDir
		return tw.WriteHeader(h)
	}
	r, size, err := n.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	h.Typeflag, h.Size = tar.TypeReg, size
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.Copy(tw, r)
	return err
}
